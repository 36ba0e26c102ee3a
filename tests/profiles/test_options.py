"""Options of the programs in profiles: what is refused says what was expected and what came."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch_kda.profiles import trace
from torch_kda.profiles.options import (
    MaybeKey,
    Number,
    Parser,
    Positive,
    Share,
    check_distinct,
    count,
    integers,
    names,
    one_of,
    positive,
    read_results,
)

SHAPE = {"meta": {"gpu": str | None}, "rows": ({"us": Positive | None, "lens": [count(0, 9)]},)}
SHAPE |= {"by_size": {str: int, MaybeKey("8"): count(1)}, MaybeKey("host"): {"cores": int}}
SHAPE |= {MaybeKey("share"): Share | None, MaybeKey("is_near"): bool}
SHAPE |= {MaybeKey("gates"): one_of(("slow", "fast")), MaybeKey("gap"): Number}
GOOD = {
    "meta": {"gpu": None},
    "rows": [{"us": 1, "lens": []}, {"us": 1.5, "lens": [3]}, {"us": None, "lens": []}],
    "by_size": {"8": 1},
}


def parser() -> Parser:
    made = Parser(prog="bench")
    made.add_argument("--counts", type=integers(0, 1_000))
    made.add_argument("--names", type=names(("a", "b")))
    made.add_argument("--peers", type=names(("a", "b"), least=0))
    made.add_argument("--folder", type=Path)
    made.add_argument("--model")
    made.add_argument("--files", type=Path, nargs="+")
    made.add_argument("--is-quick", action="store_true")
    made.add_argument("--minutes", type=positive(10))
    return made


def test_what_is_taken() -> None:
    found = parser().parse_args(["--counts", "0, 1000", "--names", "b,a,", "--minutes", "0.5"])
    assert (found.counts, found.names, found.minutes) == ((0, 1000), ["b", "a"], 0.5)
    assert parser().parse_args(["--peers", ""]).peers == []
    assert parser().parse_args(["--folder", "."]).folder == Path()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("counts", "1,1001", "expected an integer from 0 to 1,000, got '1001'"),
        ("counts", "-1", "expected an integer from 0 to 1,000, got '-1'"),
        ("counts", "1,", "expected an integer from 0 to 1,000, got ''"),
        ("names", "a,c", "['c'] are none of a, b"),
        ("names", "", "expected at least one, got ''"),
        ("names", " ,", "expected at least one, got ' ,'"),
        ("peers", "c", "['c'] are none of a, b"),
        ("folder", "", "expected a path, got ''"),
        ("files", "", "expected a path, got ''"),
        ("model", "", "expected a name, got ''"),
        ("model", " ", "expected a name, got ' '"),
        ("minutes", "11", "expected a number above 0, 10 at most, got '11'"),
    ],
)
def test_what_is_refused(
    option: str, value: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args([f"--{option}={value}"])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"bench: argument --{option}: {message}\n"


def test_refuse(capsys: pytest.CaptureFixture) -> None:
    """What was given and is not heeded is named; what was not given is not."""
    made = parser()
    options = made.parse_args(["--is-quick", "--names", "a", "--counts", "1"])
    made.refuse(options, ["folder", "peers"], "this")
    with pytest.raises(SystemExit) as end:
        made.refuse(options, ["names", "folder", "is_quick"], "this")
    assert end.value.code == 2
    assert capsys.readouterr().err == "bench: --names, --is-quick can't go with this\n"


@pytest.mark.parametrize("options", [["--device", "cpu"], ["--device", "cuda", "--no-compile"]])
def test_profile_keeps_no_compilations_where_there_are_none(
    options: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert trace.parse(["--out", "x", *options]).compile_cache is None
    with pytest.raises(SystemExit) as end:
        trace.parse(["--out", "x", "--compile-cache", "y", *options])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "--compile-cache" in line


def test_check_distinct() -> None:
    rows = [{"lens": [1], "us": 1}, {"lens": [2], "us": 1}]
    check_distinct(rows, ["lens"], "--render")
    with pytest.raises(ValueError, match=r"^--render: there are two rows of lens \[2\]$"):
        check_distinct([*rows, {"lens": [2], "us": 3}], ["lens"], "--render")


def read(path: Path, content: Any) -> Any:
    path.write_text(json.dumps(content))
    return read_results(path, SHAPE, option="--render", what="a result")


def test_read_results(tmp_path: Path) -> None:
    assert read(tmp_path / "a.json", GOOD) == GOOD
    more = {**GOOD, "new": 1, "host": {"cores": 8}, "is_near": True, "gates": "fast", "gap": -1e15}
    for share in (0, 1, 0.5, None):
        whole = {**more, "share": share}
        assert read(tmp_path / "a.json", whole) == whole


@pytest.mark.parametrize(
    ("content", "misfit"),
    [
        ({}, "it has no meta"),
        ([], "the whole is no object"),
        ({**GOOD, "meta": {}}, "it has no meta.gpu"),
        ({**GOOD, "meta": {"gpu": 3}}, "meta.gpu is 3"),
        ({**GOOD, "rows": []}, "rows is no list of anything"),
        ({**GOOD, "rows": {}}, "rows is no list of anything"),
        ({**GOOD, "rows": [*GOOD["rows"], {"lens": []}]}, "it has no rows[3].us"),
        ({**GOOD, "rows": [{"us": 1, "lens": ["x"]}]}, 'rows[0].lens[0] is "x"'),
        ({**GOOD, "rows": [{"us": 0, "lens": []}]}, "rows[0].us is 0"),
        ({**GOOD, "rows": [{"us": -1.5, "lens": []}]}, "rows[0].us is -1.5"),
        ({**GOOD, "rows": [{"us": float("nan"), "lens": []}]}, "rows[0].us is NaN"),
        ({**GOOD, "by_size": {"8": 1, "9": None}}, "by_size.9 is null"),
        ({**GOOD, "by_size": []}, "by_size is no object"),
        ({**GOOD, "host": {}}, "it has no host.cores"),
        ({**GOOD, "host": None}, "host is no object"),
        ({**GOOD, "more": [{"x": [1, float("nan")]}]}, "more[0].x[1] is NaN"),
        ({**GOOD, "more": float("inf")}, "more is Infinity"),
        ({**GOOD, "more": [10**400]}, f"more[0] is {str(10**400)[:40]}"),
        ({**GOOD, "more": -1.1e15}, "more is -1100000000000000.0"),
        ({**GOOD, "more": ["\ud800"]}, 'more[0] is "\\ud800"'),
        ({**GOOD, "more": {"\ud800": 1}}, "more.\\ud800 is no name"),
        ({**GOOD, "rows": [{"us": True, "lens": []}]}, "rows[0].us is true"),
        ({**GOOD, "rows": [{"us": 1e-16, "lens": []}]}, "rows[0].us is 1e-16"),
        ({**GOOD, "rows": [{"us": 1, "lens": [True]}]}, "rows[0].lens[0] is true"),
        ({**GOOD, "rows": [{"us": 1, "lens": [2.0]}]}, "rows[0].lens[0] is 2.0"),
        *(
            ({**GOOD, "rows": [{"us": 1, "lens": [n]}]}, f"rows[0].lens[0] is {n}")
            for n in (-1, 10)
        ),
        ({**GOOD, "by_size": {"8": 0}}, "by_size.8 is 0"),
        ({**GOOD, "by_size": {"9": False}}, "by_size.9 is false"),
        ({**GOOD, "by_size": {"a\nb": None}}, "by_size.a\\nb is null"),
        *(({**GOOD, "share": share}, f"share is {share}") for share in (-3, 1.5, 40)),
        ({**GOOD, "share": True}, "share is true"),
        ({**GOOD, "gates": "slower"}, 'gates is "slower"'),
        ({**GOOD, "gap": 1e16}, "gap is 1e+16"),
    ],
)
def test_read_results_of_another(tmp_path: Path, content: Any, misfit: str) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ValueError) as error:
        read(path, content)
    assert str(error.value) == f"--render: {path} is not a result: {misfit}"


@pytest.fixture
def usual_recursion() -> Iterator[None]:
    """Python's own limit, which packages raise once they are imported."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion")
@pytest.mark.parametrize("text", ["[" * 100_000, '{"more": ' * 600 + "1" + "}" * 600])
def test_read_results_nested_too_deep(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    shape: Any = {}
    with pytest.raises(ValueError) as error:
        read_results(path, shape, option="--render", what="a result")
    assert str(error.value) == f"--render: {path} is not a result: it is nested too deep"


def test_read_results_checks_last(tmp_path: Path) -> None:
    """A check sees what has its shape, and says what is amiss."""
    path, shape = tmp_path / "a.json", {"a": int}

    def check(found: Any) -> str | None:
        return None if found["a"] < 3 else "a is too large"

    for content, misfit in (('{"a": 2}', None), ('{"a": 3}', "a is too large"), ("{}", "has no a")):
        path.write_text(content)
        context = pytest.raises(ValueError, match=misfit) if misfit else nullcontext()
        with context:
            found = read_results(path, shape, option="--render", what="a result", check=check)
            assert found == {"a": 2}


def test_read_results_of_no_file(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "can't be read: No such file"), (tmp_path, "Is a dir")):
        with pytest.raises(ValueError, match=why):
            read_results(path, SHAPE, option="--render", what="a result")
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="is not JSON"):
        read_results(tmp_path / "picture", SHAPE, option="--render", what="a result")
