"""
Problems of the recipes, read from the columns of the datasets. Every row gets a `prompt`, and a `solution` (for
mathematics) or `tests` (for programs).

| name         | dataset on the Hub                      | columns                                                   |
|--------------|-----------------------------------------|-----------------------------------------------------------|
| `math`       | DigitalLearningGmbH/MATH-lighteval      | `problem`, `solution` (ends in a box), `level`, `type`    |
| `gsm8k`      | openai/gsm8k (`main`)                   | `question`, `answer` (ends in `#### 72`)                  |
| `deepscaler` | agentica-org/DeepScaleR-Preview-Dataset | `problem`, `answer`, `solution` (often empty)             |
| `deepcoder`  | agentica-org/DeepCoder-Preview-Dataset  | `problem`, `tests`, in `lcbv5` `starter_code`, `metadata` |
| `codeforces` | open-r1/codeforces (`verifiable`)       | `description`, formats, `examples`, `official_tests`      |

Rows of Codeforces are left out if several answers are right (`generated_checker`) or if programs read files
(`input_mode`). Any family of reasoning-gym is a source too, such as `countdown`, `sokoban`, `sudoku` or `maze`; its
rows have `family` and `entry` instead of a solution.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset


BOX = "\n\nPut the final answer in \\boxed{}."
PROGRAM = "\n\nWrite a Python program that reads standard input and prints the answer, in one ```python block."
FUNCTION = "\n\nWrite the Python function `{name}`, or that method of a class `Solution`, in one ```python block."
STARTER = "\n\nBegin with this code:\n```python\n{code}\n```"
TAG = "\n\nPut the final answer between <answer> and </answer>."

GYM_SIZE = 5000  # questions to generate from a family of reasoning-gym
# Columns of files whose rows need no conversion
READY = {"math": ("prompt", "solution"), "code": ("prompt", "tests")}


@dataclass(frozen=True)
class Source:
    """A dataset on the Hub, and the function that converts its rows (`None` for a row that cannot be scored)."""

    path: str
    names: tuple[str | None, ...]
    columns: tuple[str, ...]
    read: callable
    kind: str  # "math", "code" or "gym"
    has_test: bool = False  # whether there is a split to evaluate on


def read_math(row):
    from marft_trl.rewards import boxed

    return _math(row["problem"], boxed(row["solution"] or ""))


def read_gsm8k(row):
    _, mark, answer = row["answer"].rpartition("####")
    return _math(row["question"], answer.strip().replace(",", "") if mark else None)


def read_deepscaler(row):
    return _math(row["problem"], row["answer"])


def _math(problem, answer):
    if not problem or not str(answer or "").strip():
        return None
    return {"prompt": [{"role": "user", "content": problem.strip() + BOX}], "solution": str(answer).strip()}


def read_deepcoder(row, max_tests=16):
    tests = as_tests(row.get("tests"), row.get("metadata"), max_tests)
    if not row.get("problem") or tests is None:
        return None
    text = row["problem"].strip() + (FUNCTION.format(name=tests["function"]) if tests.get("function") else PROGRAM)
    if (row.get("starter_code") or "").strip():
        text += STARTER.format(code=row["starter_code"].strip())
    return {"prompt": [{"role": "user", "content": text}], "tests": json.dumps(tests)}


def read_codeforces(row, max_tests=16):
    tests = as_tests([*(row.get("examples") or []), *(row.get("official_tests") or [])], None, max_tests)
    if not row.get("description") or tests is None:
        return None
    if row.get("generated_checker") or row.get("input_mode") not in (None, "", "stdio"):
        return None
    parts = [row.get("title"), row["description"]]
    parts += [f"{name}\n{row[key]}" for name, key in _FORMATS.items() if row.get(key)]
    shown = [f"Input:\n{example['input']}\nOutput:\n{example['output']}" for example in row.get("examples") or []]
    text = "\n\n".join(part.strip() for part in [*parts, *shown] if part) + PROGRAM
    return {"prompt": [{"role": "user", "content": text}], "tests": json.dumps(tests)}


_FORMATS = {"Input": "input_format", "Output": "output_format", "Note": "note"}


def as_tests(tests, metadata=None, most=16):
    """
    The tests of a DeepCoder row as `code_reward` takes them, or `None` if they cannot be read. Three forms: TACO's,
    one mapping with `inputs`, `outputs` and maybe `fn_name`; PrimeIntellect's, a list of mappings with `input`,
    `output`, `type` and maybe `fn_name`; LiveCodeBench's, the same with `testtype` and the function's name in
    `metadata`.
    """
    tests = _parsed(tests)
    if isinstance(tests, dict):
        inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        inputs, outputs = [test.get("input") for test in tests], [test.get("output") for test in tests]
        function = _function_of(tests[0], _parsed(metadata)) if tests else None
    else:
        return None
    if not inputs or not isinstance(outputs, list) or len(inputs) != len(outputs) or None in inputs:
        return None
    # The longest inputs test the most
    chosen = sorted(range(len(inputs)), key=lambda index: -len(str(inputs[index])))[:most]
    inputs, outputs = [inputs[index] for index in chosen], [outputs[index] for index in chosen]
    if function is None:
        return {"inputs": list(map(_lines, inputs)), "outputs": list(map(_lines, outputs))}
    try:
        arguments, values = list(map(_arguments, inputs)), list(map(_value, outputs))
    except ValueError:
        return None
    # TACO and PrimeIntellect wrap the return value in a list, LiveCodeBench does not
    is_wrapped = isinstance(tests, dict) or "testtype" not in tests[0]
    return {"inputs": arguments, "outputs": values, "function": function, "wrapped": is_wrapped}


def _parsed(value):
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _function_of(test, metadata):
    if test.get("type") == "function_call" or test.get("fn_name"):
        return test.get("fn_name")
    if test.get("testtype") != "functional":
        return None
    own_metadata = _parsed(test.get("metadata")) or {}
    return own_metadata.get("func_name") or (metadata or {}).get("func_name")


def _lines(text):
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _arguments(value):
    """Arguments of a call: a list, or JSON, one value a line."""
    return [json.loads(line) for line in value.strip().split("\n")] if isinstance(value, str) else list(value)


def _value(value):
    return json.loads(value) if isinstance(value, str) else value


def load_file(file, source):
    """Rows of a local file, after checking that it has the columns of the source."""
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
    if Path(file).suffix not in kinds:
        raise ValueError(f"A file of `--problem_files` must end in {', '.join(kinds)}; got {file!r}.")
    rows = load_dataset(kinds[Path(file).suffix], data_files=file, split="train")
    ready = READY[source.kind]
    missing = [column for column in source.columns if column not in rows.column_names]
    if missing and not set(ready) <= set(rows.column_names):
        raise ValueError(
            f"{file!r} lacks the columns {missing} of {source.path}, and is no file of {' and '.join(ready)} either; "
            f"it has {rows.column_names}."
        )
    return rows


def reader_of(part, source):
    """The function that converts the rows of a part. Rows with a `prompt` and a solution or tests stay."""
    ready = READY[source.kind]
    if not set(ready) <= set(part.column_names) or set(source.columns) <= set(part.column_names):
        return source.read

    def read_ready(row):
        prompt, score = row["prompt"], row[ready[1]]
        if not prompt or not score:
            return None
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return {"prompt": prompt, ready[1]: score if isinstance(score, str) else json.dumps(score)}

    return read_ready


SOURCES = {
    "math": Source("DigitalLearningGmbH/MATH-lighteval", (None,), ("problem", "solution"), read_math, "math", True),
    "gsm8k": Source("openai/gsm8k", ("main",), ("question", "answer"), read_gsm8k, "math", True),
    "deepscaler": Source(
        "agentica-org/DeepScaleR-Preview-Dataset", (None,), ("problem", "answer"), read_deepscaler, "math"
    ),
    "deepcoder": Source(
        "agentica-org/DeepCoder-Preview-Dataset",
        ("primeintellect", "taco", "lcbv5"),
        ("problem", "tests"),
        read_deepcoder,
        "code",
    ),
    "codeforces": Source(
        "open-r1/codeforces", ("verifiable",), ("description", "official_tests"), read_codeforces, "code"
    ),
}


def source_of(name):
    """The source of a name. Names that are not in `SOURCES` are families of reasoning-gym."""
    return SOURCES.get(name) or Source(f"reasoning-gym/{name}", (None,), ("prompt", "entry"), None, "gym")


def load_problems(source, files=None, split="train", gym_size=GYM_SIZE):
    """
    The problems of a source, from the Hub or from local files (`.jsonl`, `.json`, `.parquet`) of the same columns, or
    of `prompt` and `solution` (mathematics) or `tests` (programs).
    Rows that cannot be scored are left out, and their number is printed. A family of reasoning-gym generates
    `gym_size` questions.
    """
    chosen = source_of(source)
    if chosen.kind == "gym":
        from marft_trl.extras.tasks import reasoning_gym

        questions = reasoning_gym(source, size=gym_size)
        return questions.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"][0]["content"] + TAG}]})
    if files:
        parts = [load_file(file, chosen) for file in files]
    else:
        parts = [load_dataset(chosen.path, name, split=split) for name in chosen.names]
    problems = [
        Dataset.from_list([problem for problem in map(reader_of(part, chosen), part) if problem is not None])
        for part in parts
    ]
    problems = [part for part in problems if len(part)]
    total = sum(map(len, parts))
    if not problems:
        raise ValueError(f"None of the {total} rows of {source!r} has a problem and what scores it.")
    dataset = concatenate_datasets(problems)
    print(f"{source}: {len(dataset)} problems; {total - len(dataset)} rows without an answer or tests are left out")
    return dataset
