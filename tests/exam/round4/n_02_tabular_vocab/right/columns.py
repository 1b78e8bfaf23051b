"""A made-up insurance table: three categorical columns with string values, four numeric ones, a claim cost."""
import random

CITIES = ["Aachen", "Bonn", "Celle", "Dresden", "Essen", "Fulda", "Gotha", "Hanau", "Ilmenau", "Jena", "Kassel", "Lemgo"]
CARS = ["van", "coupe", "kombi", "suv", "mini", "truck", "cabrio"]
JOBS = ["nurse", "clerk", "baker", "pilot", "judge", "farmer", "actor", "cook", "tailor"]
CATEGORICAL = ("city", "car", "job")
NUMERIC = ("age", "km", "power", "years")


def make_rows(n, seed=5):
    r = random.Random(seed)
    effect = {v: r.gauss(0, 1) for v in CITIES + CARS + JOBS}
    rows = []
    for _ in range(n):
        row = {"city": r.choice(CITIES), "car": r.choice(CARS), "job": r.choice(JOBS)}
        row.update({c: r.gauss(0, 1) for c in NUMERIC})
        row["cost"] = (effect[row["city"]] + effect[row["car"]] * (1 + 0.3 * row["km"]) + effect[row["job"]]
                       + 0.5 * row["age"] - 0.4 * row["power"] * row["years"] + r.gauss(0, 0.1))
        rows.append(row)
    return rows
