"""What of a text is a credential, and what only looks like one: in a training script `token` is an
ordinary word.
"""

import time

import pytest

from records import cases
from verified_fsdp2.verifier.report.secrets import redact_named, redact_secrets

# Made of parts, so that no scanner takes this file for a leak.
KEY = "aB3" * 12  # of 36 characters
HF, GITHUB, GITLAB = f"hf_{KEY[:34]}", f"ghp_{KEY}", f"glpat-{KEY[:20]}"
FINE = f"github_pat_{KEY}_{KEY}"
OPENAI, ANTHROPIC = f"sk-proj-{KEY}", f"sk-ant-api03-{KEY}-{KEY}"
AWS, AWS_TEMPORARY = "AKIA" + "A1B2" * 4, "ASIA" + "A1B2" * 4
SLACK, GOOGLE = "xoxb-" + "123456789-" * 2 + "abc", "AIza" + KEY[:35]
JWT = f"eyJ{KEY}.eyJ{KEY}.{KEY}"
HEX = "0123456789abcdef" * 2 + "01234567"  # of 40 characters, as a commit and a key of wandb
PEM = "PRIVATE KEY-----"
BLOCK = f"-----BEGIN RSA {PEM}\n{KEY * 2}\n{KEY * 2}\nabc=\n-----END RSA {PEM}"

HIDDEN = [
    # environment
    ("HF_TOKEN=abcdef", "HF_TOKEN=***"),
    ("export WANDB_API_KEY=abc123; python train.py", "export WANDB_API_KEY=***; python train.py"),
    ("DB_PASSWORD=hunter2 DB_USER=me", "DB_PASSWORD=*** DB_USER=me"),
    ("AWS_SECRET_ACCESS_KEY=a/b+c", "AWS_SECRET_ACCESS_KEY=***"),
    ("MYSQL_PWD=abc", "MYSQL_PWD=***"),
    ("SECRET_KEY_2=abc", "SECRET_KEY_2=***"),
    (f"MY_TOKEN={HEX}", "MY_TOKEN=***"),
    ("AccountKey=abc==;EndpointSuffix=core", "AccountKey=***;EndpointSuffix=core"),
    ('os.environ["HF_TOKEN"] = "abcdef"', 'os.environ["HF_TOKEN"] = "***"'),
    # keywords, mappings and text
    ("login failed with password=hunter2", "login failed with password=***"),
    ("cannot log in: password: hunter2 is wrong", "cannot log in: password: *** is wrong"),
    ("password: 12345678", "password: ***"),
    ("wrong password 'correct horse'", "wrong password '***'"),
    ("KeyError: {'api_key': 'abc', 'n': 3}", "KeyError: {'api_key': '***', 'n': 3}"),
    ('{"secret": "a, b", "size": 3}', '{"secret": "***", "size": 3}'),
    (r'"{\"token\": \"abc\", \"n\": 1}"', r'"{\"token\": \"***\", \"n\": 1}"'),
    ("Client(user='me', apiKey='abc')", "Client(user='me', apiKey='***')"),
    ('login(token="abcdef")', 'login(token="***")'),
    ("login(token=abc1def2)", "login(token=***)"),
    ("def load(token: str = 'abcdef'):", "def load(token: str = '***'):"),
    ("token: a1b2c3d4e5", "token: ***"),
    ("API key: abc", "API key: ***"),
    ("auth=('me', 'hunter2')", "auth=(***)"),
    ("fs.s3a.secret.key=abc", "fs.s3a.secret.key=***"),
    ("secret: 'cut here", "secret: '*** here"),
    (r"line 1\npassword=abc", r"line 1\npassword=***"),
    ("if password == 'hunter2':", "if password == '***':"),
    # options
    ("train.py --hub-token abc --steps 5", "train.py --hub-token *** --steps 5"),
    ("train.py --token=abc --steps 5", "train.py --token=*** --steps 5"),
    ("--save-args '--api-key abc --out x'", "--save-args '--api-key *** --out x'"),
    ("--password 'a b' --steps 5", "--password '***' --steps 5"),
    ("['--password', 'abc', '--steps', '5']", "['--password', '***', '--steps', '5']"),
    ("--db_passwd -- 5; --db_passwd hunter2", "--db_passwd -- 5; --db_passwd ***"),
    # URLs and headers
    ("GET https://me:hunter2@host/a", "GET https://***@host/a"),
    ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
    ("postgres://me:p@ss/w@host/db", "postgres://***@ss/w@host/db"),
    (f"https://{KEY}@host/a", "https://***@host/a"),
    ("s3/a?X-Amz-Signature=abc&x=1", "s3/a?X-Amz-Signature=***&x=1"),
    ("a?sv=1&sig=abc%2B", "a?sv=1&sig=***"),
    ("a?access_token=abc&x=1", "a?access_token=***&x=1"),
    ("Authorization: Bearer abc", "Authorization: Bearer ***"),
    ("{'Authorization': 'Basic YTpi'}", "{'Authorization': '***'}"),
    ("sent Bearer a1b2c3d4e5", "sent Bearer ***"),
    ("sent Basic bWU6aHVudGVyMg==", "sent Basic ***"),
    # shapes
    *((f"a {one}, b", "a ***, b") for one in (HF, GITHUB, FINE, GITLAB, OPENAI, ANTHROPIC, JWT)),
    *((f"a ({one}) b", "a (***) b") for one in (AWS, AWS_TEMPORARY, SLACK, GOOGLE)),
    (f"a {BLOCK} b", "a *** b"),
    (f"a {BLOCK!r} b", "a '***' b"),
    (f"wandb login {HEX}", "wandb login ***"),
    (f"wandb.login(key='{HEX}')", "wandb.login(key='***')"),
    (
        f"machine api.wandb.ai login user password {HEX}",
        "machine api.wandb.ai login user password ***",
    ),
]
KEPT = [
    # a language model's tokens
    "tokens=4096",
    "n_tokens: 12",
    "max_new_tokens=128 and max_new_token=128",
    "token_ids: [1, 2, 3]",
    "token: 17",
    "token=17",
    "token='<s>' and token=\"[CLS]\"",
    "pad_token='end' eos_token: 'stop'",
    "--pad-token end --eos_token=stop",
    "next token: 'hello', previous token: 'a1b2c3d4'",
    "tokenizer=gpt2, tokenizer: gpt2",
    "--tokenizer gpt2 --tokens 4096",
    "loss per token: 0.25 and loss_per_token=0.25",
    "token-mean-of-means: the mean over tokens is 1.5",
    "tokens/s: 1000",
    "JSON: unexpected token: 'a1b2c3d4'",
    "not well-formed (invalid token): line 1, column 5",
    "token: differs between ranks",
    "token = logits.argmax(-1)",
    "token = next(tokens)",
    # parameters, shapes, numbers
    "tokens.weight: rank 0 has [16, 8], rank 1 [16, 4]",
    "auth.weight: 0.5 apart, allowed 0.1",
    "token.weight: missing",
    "secret.bias = tensor([0.1, 0.2])",
    "keys: 3, key=weight, storage_key: 0/1",
    "missing keys: model.layers.0.weight, model.head.weight",
    "key_proj: Linear(8, 8), query_key_value: (3, 8)",
    "access_key=None, api_key=True, secret=''",
    "password_file=/etc/x, auth_type=basic, secret_name=db",
    # words
    "author: me, authors=a",
    "keyword=abc, monkey=abc, keyboard: abc",
    "unexpected keyword argument 'token'",
    "missing 1 required positional argument: 'password'",
    "Invalid credentials: please log in",
    "auth: failed",
    "give --token or set HF_TOKEN",
    "basic training, Bearer tokens, Basic auth",
    "forward_pass: second, passes=3",
    "sk-learn-based-pipeline-for-models",
    "hf_hub_download and hf_transfer",
    "PWD=/home/me/run OLDPWD=/home/me",
    # placeholders and code
    "HF_TOKEN=$HF_TOKEN --token ${HF_TOKEN}",
    "--token <your token>",
    "login(token=args.hub_token)",
    'token=os.environ["HF_TOKEN"]',
    "password=getpass()",
    "f'token={token}'",
    # addresses
    "https://host:8080/a and tcp://127.0.0.1:29500",
    "ssh://git@host/a and git+ssh://git@host/a",
    "http://host:8080/@user",
    "https://host/a?page=2&key=loss",
    # names of commits and hashes
    f"at commit {HEX}",
    f"git checkout {HEX}",
    "sha256:" + "0" * 64,
    "torch 2.13.0+cpu at 0x7f0000000000",
    "S(0), Replicate(), mesh dp=2 x tp=4",
]
NAMED = [
    ("HF_TOKEN", "abc", "***"),
    ("--password", "12345", "***"),
    ("env", "TOKEN=abc", "TOKEN=***"),
    ("tokens", "a b", "a b"),
    ("auth", "none", "none"),
]
PARTS = [
    *(
        "token",
        "secret=",
        "password: ",
        "--token ",
        "token='",
        'token="',
        'token="\\',
        "token: `",
        "key=",
        "'",
        '"',
    ),
    *(
        "eyJ",
        "eyJaaaaaaaa.",
        "://",
        "://a:",
        "http://a:b",
        "?sig=",
        "Bearer ",
        "sk-a",
        "-",
        "\\n",
        "a.",
        "secret=a;",
    ),
    *(
        "-----BEGIN PRIVATE KEY-----",
        "wandb login ",
        "login x password ",
        'token=["a",',
        "secret[token=",
        "'''",
    ),
    *("PWD=/", "password==", "token=abc(", "hf_", "api key: ", "A" * 16, "=> "),
]


@cases("text, expected", *HIDDEN)
def test_a_credential_is_hidden(text: str, expected: str) -> None:
    assert redact_secrets(text) == expected
    assert redact_secrets(expected) == expected


@cases("text", *KEPT)
def test_what_is_none_stays(text: str) -> None:
    assert redact_secrets(text) == text


@cases("name, value, expected", *NAMED)
def test_the_value_of_a_field(name: str, value: str, expected: str) -> None:
    assert redact_named(name, value) == expected


def seconds(part: str, characters: int) -> float:
    """The time of one pass over so many characters."""
    text = (part * (characters // len(part) + 1))[:characters]
    started = time.process_time()
    redact_secrets(text)
    return time.process_time() - started


@pytest.mark.parametrize("part", PARTS)
def test_time_is_linear(part: str) -> None:
    """Four times the text takes four times as long, not sixteen times; no limit in seconds, since
    machines differ.
    """
    assert seconds(part, 1_000_000) < 8 * seconds(part, 250_000) + 0.2
