"""The seeded faults: `python faults.py` lists their data; `trainer.py --case NAME` runs one."""

from __future__ import annotations

from cases import Facts, all_cases

FAULTS: list[Facts] = all_cases("faults")


def main() -> None:
    for fault in FAULTS:
        print(f"{fault.name:28} {fault.law:24} {fault.begin:>4}  {fault.wrong}")
    print(f"{len(FAULTS)} faults")


if __name__ == "__main__":
    main()
