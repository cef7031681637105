"""Recordings that users write as CSV or JSON lines become traces; a mistake is refused with file, row and column."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from harness.cli.main import main
from simulators.calibration.recorded.recordings import read_tables
from traces.convert import to_csv
from traces.foreign.own_tables import from_tables
from traces.parts import check_trace, origin, scan
from traces.plausible import TraceError
from traces.schema import TRACE
from traces.shipped import locate
from traces.summary import summarise

ITERATIONS = "seconds,worker,clock,compute_seconds,loss\n" + "".join(
    f"{0.25 * (c + 1) + worker / 100:.2f},{worker},{c},{'NaN' if c == 3 else 0.2},\n" for worker in (0, 1) for c in range(10)
)
SETTINGS = "seconds,workers,servers,batch_size,policy\n0,2,1,32,asp\n"


NAMED = "seconds,workers,servers,policy,batch_size,setting\n0,{},{},{},{},{}\n"
NODES = '"{""workers"":[""a"",""b""],""servers"":[""c""],""policy"":""asp"",""batch_size"":32}"'


def converted(folder: Path, **files: str) -> Path:
    """The trace of a folder `mine` with these files; an underscore stands for the dot of a name."""
    (folder / "mine").mkdir()
    for name, text in files.items():
        (folder / "mine" / name.replace("_", ".")).write_bytes(text.encode("latin-1"))
    from_tables(folder / "mine", folder / "trace", made_by="a test")
    return folder / "trace"


def test_the_tables_of_a_trace_become_the_same_trace_again(tmp_path: Path) -> None:
    shipped = locate("shipped:homogeneous")
    to_csv(shipped, tmp_path / "tables")
    from_tables(tmp_path / "tables", tmp_path / "again", made_by="a test")
    for table in TRACE:
        theirs, ours = scan(shipped, table).collect(), scan(tmp_path / "again", table).collect()
        # An empty text and none at all are the same in CSV.
        assert ours.with_columns(pl.col(pl.String).fill_null("")).equals(
            theirs.with_columns(pl.col(pl.String).fill_null(""))
        )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_logs_of_one_run_need_no_name_no_branch_and_no_order_of_workers(tmp_path: Path, end: str) -> None:
    trace = converted(
        tmp_path, iterations_csv=ITERATIONS.replace("\n", end).rstrip(), settings_csv=SETTINGS.replace("\n", end)
    )
    assert check_trace(trace) == {"runs": 1, "settings": 1, "iterations": 20}
    pushes = scan(trace, "iterations").collect()
    assert set(pushes["run"]) == {"mine"}
    assert pushes["seconds"].is_sorted()
    assert pushes["compute_seconds"].null_count() == 2
    assert pushes["loss"].null_count() == 20
    assert [name for name, _ in origin(trace).inputs] == ["iterations.csv", "settings.csv"]
    found = read_tables({table: scan(trace, table).collect() for table in TRACE})
    assert [(row.workers, row.servers, row.policy) for row in found.rows] == [(2, 1, "asp")]
    assert found.rows[0].cycle_seconds == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("end", ["\n\n", "  \n", "\r\n\r\n", ",,\n"])
def test_empty_lines_at_the_end_are_no_rows(tmp_path: Path, end: str) -> None:
    rows = "".join(f"{c}.5,0,{c}\n" for c in range(5))
    trace = converted(tmp_path, iterations_csv="seconds,worker,clock\n" + rows + end)
    assert scan(trace, "iterations").collect()["clock"].to_list() == [0, 1, 2, 3, 4]


def test_json_lines_are_tables_too(tmp_path: Path) -> None:
    settings = {"seconds": 0, "workers": 2, "servers": 1, "policy": None, "options": {"zone": "a"}}
    progress = "".join(json.dumps({"seconds": s, "steps": 10 * s, "training_loss": float("nan")}) + "\n" for s in (1, 2, 4))
    trace = converted(tmp_path, settings_jsonl=json.dumps(settings) + "\n\n", progress_jsonl=progress)
    held = scan(trace, "settings").collect().row(0, named=True)
    assert (held["workers"], held["policy"], json.loads(held["options"])) == (2, None, {"zone": "a"})
    assert scan(trace, "progress").collect()["steps"].to_list() == [10, 20, 40]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"iteration_csv": ITERATIONS}, "no table of a trace is called 'iteration'; did you mean iterations?"),
        (
            {"iterations_csv": "seconds,worker,clock,compute_ms\n"},
            "'compute_ms': iterations has no such column; did you mean",
        ),
        (
            {"progress_csv": "seconds,steps,loss\n"},
            "'loss': progress has no such column; did you mean training_loss or valid",
        ),
        ({"runs_csv": "seconds,steps,usd\n"}, "column 'usd': runs has no such column; did you mean cost_usd?"),
        (
            {"iterations_csv": "seconds,worker,clock,host\n"},
            "column 'host': iterations has no such column; leave it out, or choose one of run, branch, seconds",
        ),
        (
            {"iterations_csv": ",seconds,worker,clock\n"},
            "iterations has no such column; if it has the numbers of rows, leave it out: pandas does so with index=False.",
        ),
        (
            {"iterations_csv": "seconds;worker;clock\n"},
            "mine/iterations.csv: its fields are divided by semicolons: divide them by commas, and write numbers with a",
        ),
        ({"iterations_csv": "seconds,worker\n1,0\n"}, "column 'clock': the column is missing"),
        ({"progress_csv": "seconds,steps,accuracy\n1,9,93.5\n"}, "(is this per cent? Shares are from 0 to 1)."),
        (
            {"iterations_csv": "seconds,worker,clock\n1,w0,0\n"},
            "row 1, column 'worker': 'w0' is no whole number: number the workers of a run, from 0.",
        ),
        ({"iterations_csv": "seconds,worker,clock\n2,0,0\n1,0,1\n"}, "row 2, column 'seconds': time runs backwards"),
        (
            {"iterations_csv": "seconds,worker,clock\n1,0,0\n2,0,1\n1,0,0\n"},
            "row 3: there is a row with run 'mine', branch 0, worker 0, clock 0, seconds 1.0 already; give each once.",
        ),
        (
            {"iterations_csv": "seconds,worker,clock\n2,0,0\n1,0,1\n"},
            "later ones; sort the rows by seconds, or correct times where a c",
        ),
        (
            {"iterations_csv": "seconds,worker,clock,compute_seconds\n1,0,0,900\n2,0,1,900\n"},
            "take 1800 s in all, within 1 s (are these milliseconds?).",
        ),
        (
            {"iterations_csv": "seconds,worker,clock\n1700000000,0,0\n"},
            "or seconds since 1970? They count from the beginning",
        ),
        ({"iterations_csv": ""}, "it is empty."),
        (
            {"iterations_csv": "seconds,worker,clock\n", "settings_csv": "seconds,workers\n"},
            "mine: its tables have no rows.",
        ),
        ({"iterations_csv": "seconds\tworker\tclock\n"}, "its fields are divided by tabs"),
        ({"settings_csv": 'seconds;workers\n"0,5";1\n'}, "its fields are divided by semicolons"),  # as spreadsheets write
        (
            {"iterations_csv": "seconds,worker,clock\n2026-11-26T10:00:00Z,0,0\n"},
            "is no number: give the seconds since the run began.",
        ),
        ({"iterations_csv": "seconds,worker\n1,0\n"}, "every row of iterations needs it: number the iterations of each"),
        (
            {"iterations_csv": ITERATIONS, "settings_csv": SETTINGS.replace("0,2,1", "0,1,1")},
            "run 'mine' has iterations of 2 workers (the last one is 1), and at most 1 workers in settings: number the",
        ),
        ({"iterations_jsonl": '{"seconds": 1}\n{"sec\n'}, "row 2: it is no JSON"),
        (
            {"settings_jsonl": '{"workers": 2, "seconds": 0, "workers": 3}\n'},
            "row 1: it is no JSON (the key 'workers' is there tw",
        ),
        ({"iterations_jsonl": "[1]\n"}, "row 1: it is no JSON object"),
        ({"runs_csv": "run,extras\na,zone-a\n"}, "row 1, column 'extras': 'zone-a' is not a JSON object"),
        ({"settings_csv": "seconds,workers,servers,setting\n0,1,1,{}\n"}, "is not a setting as"),
        ({"reconfigurations_csv": "seconds,done\n1,perhaps\n"}, "'perhaps' is no true or false."),
        (
            {"runs_csv": "run\na\n", "settings_csv": "run,seconds\nb,0\n"},
            "settings.csv, column 'run': the run 'b' is not in runs; write its row there, or its name as it is there.",
        ),
        ({"runs_csv": "run\na\n", "runs_jsonl": '{"run": "a"}\n'}, "there is another file with the table runs"),
        (
            {"settings_csv": SETTINGS, "runs_json": '[{"run": "a"}]'},
            "it would be left out: write the table as CSV or as JSON lines, runs.csv or .jsonl.",
        ),
        (
            {"settings_csv": SETTINGS, "iterations_csv_gz": "packed"},
            "iterations.csv.gz: it would be left out: write the table as CSV or as JSON lines, iterations.csv or .jsonl.",
        ),
        ({"settings_csv": "seconds,workers\n0,9000000000\n"}, "'workers': the value is 9000000000, which is above 100000,"),
        ({"iterations_csv": "seconds,worker,clock\n1,0,0\n\n2,0,1\n"}, "row 2, column 'worker': the value is missing."),
        ({"settings_csv": "seconds,workers\n0,1.5\n"}, "'1.5' is no whole number."),
        (
            {"probes_csv": "seconds,node,bandwidth_bytes_per_second\n0,a,8e12\n"},
            "which is above 1e+12, the most that is plausible (are these bits?).",
        ),
        (
            {"iterations_csv": "seconds,worker,clock,compute_seconds\n1,0,0,0.25\n\n2,0,1"},
            "iterations.csv, row 3: it has 3 fields, and the first line has 4: is the file cut short?",
        ),
        (
            {"runs_csv": 'run,workload,seconds\n"a,b",c,1\n"d,e",f'},
            "row 2: it has 2 fields, and the first line has 3: is the file cut short?",
        ),
        (
            {"settings_csv": "seconds,workers,servers\n0,2,1\n0,2,1\n30,2,1\n30,3,1\n"},
            "settings.csv, row 4, column 'seconds': run 'mine' has another setting from second 30 on; give the seconds from",
        ),
        (
            {"settings_csv": "workers,servers\n2,1\n"},
            "needs it: give the seconds from when on a setting holds, 0 for the first of a run.",
        ),
        (
            {"settings_csv": NAMED.format(3, 1, "asp", 32, NODES)},
            "row 1, column 'workers': it is 3, and 2 (a, b) in the column setting; correct one of them.",
        ),
        ({"settings_csv": NAMED.format(2, 2, "", "", NODES)}, "'servers': it is 2, and 1 (c) in the column setting;"),
        (
            {"settings_csv": NAMED.format("", "", "sync", "", NODES)},
            "'policy': it is bsp, and asp in the column setting; correct one of them.",
        ),
        ({"settings_csv": NAMED.format(2, 1, "asp", 16, NODES)}, "'batch_size': it is 16, and 32 in the column setting"),
        (
            {"settings_csv": SETTINGS.replace("servers", " workers")},
            "column 'workers': there are two columns of this name; leave one of them out.",
        ),
        ({"settings_csv": SETTINGS.replace("servers", "workers")}, "column 'workers': there are two columns of this name"),
        ({"runs_csv": "run\nA\n", "settings_csv": "run,seconds\na,0\n"}, "or its name as it is there. Did you mean 'A'?"),
        ({"runs_csv": 'run,seconds\n"",5\n'}, "row 1, column 'run': the value is missing."),
        (
            {"iterations_csv": "seconds,worker,clock\r1,0,0\r2,0,1\r"},
            "iterations.csv: its lines end with a carriage return alone: end them with a newline.",
        ),
        (
            {"settings_csv": SETTINGS.encode("utf-16").decode("latin-1")},
            "settings.csv, row 1: it holds a zero byte, and is no text in UTF-8: save it as such.",
        ),
        ({"runs_csv": "run\nK\u00f6ln\n"}, "byte 5 is no text in UTF-8: save it as such."),
        (
            {"runs_csv": 'run,extras\na,"{""nodes"": {""n0"": {""nic_bytes_per_second"": ""1e6""}}}"\n'},
            "row 1, column 'extras': Expected `float`, got `str`",
        ),
        (
            {"runs_csv": 'run,extras\na,"{""nodes"": {""n0"": {""nic_bytes_per_sec"": 1e6}}}"\n'},
            "'extras': nobody reads the key 'nic_bytes_per_sec'; did you mean nic_bytes_per_second?",
        ),
        (
            {"runs_csv": 'run,extras\na,"{""node_order"": [""b"", ""a"", ""b""]}"\n'},
            "'extras': node_order has 'b' twice: give each node once, in the order of their numbers.",
        ),
        (
            {"settings_csv": 'seconds,workers,options\n0,2,"{""batch_sizes"": [32, 16, 8]}"\n'},
            "row 1, column 'options': batch_sizes is [32, 16, 8]: give 2 whole numbers, each 1 or more, one per worker.",
        ),
        (
            {"settings_csv": 'seconds,servers,options\n0,2,"{""model_shares"": [1.5, -0.5]}"\n'},
            "'options': model_shares is [1.5, -0.5]: give 2 numbers, none negative, one per server.",
        ),
        (
            {"settings_csv": 'seconds,workers,options\n0,2,"{""batchsizes"": [32, 16]}"\n'},
            "'options': nobody reads the option 'batchsizes'; did you mean batch_sizes?",
        ),
        (
            {"settings_csv": 'seconds,setting\n0,"{""workers"": [], ""servers"": [], ""local_step"": 2}"\n'},
            "'setting': a setting has no 'local_step'; did you mean local_steps?",
        ),
        (
            {"settings_csv": SETTINGS, "progress_csv": "seconds,steps,policy\n1,9,sync\n"},
            "progress.csv, column 'policy': run 'mine' has progress under bsp, and asp in its settings;",
        ),
        (
            {"iterations_csv": "seconds,worker,clock,wait_seconds\n1,0,0,-0.001\n"},
            "the value is -0.001, which is below",
        ),
    ],
)
def test_what_is_no_table_is_refused_and_nothing_is_written(tmp_path: Path, files: dict[str, str], said: str) -> None:
    with pytest.raises(TraceError) as refused:
        converted(tmp_path, **files)
    assert said in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            '[""a"",""b"",""c""]',
            "worker 2, which is 'c' by node_order in its extras, and no setting has it as a worker (a, b);",
        ),
        ('[""a"",""b""]', "worker 2, which is no node by node_order in its extras"),
    ],
)
def test_numbers_from_1_are_not_those_of_other_nodes(tmp_path: Path, order: str, said: str) -> None:
    """Workers 1 and 2 were taken for the second node and none, or for the second one and a server."""
    rows = "seconds,worker,clock\n" + "".join(f"{c}.{w},{w},{c}\n" for c in range(5) for w in (1, 2))
    files = {"iterations_csv": rows, "settings_csv": NAMED.format(2, 1, "asp", 32, NODES)}
    with pytest.raises(TraceError) as refused:
        converted(tmp_path, runs_csv=f'run,extras\nmine,"{{""node_order"":{order}}}"\n', **files)
    assert said in str(refused.value)
    assert "node_order begins with number 0." in str(refused.value)


def test_rows_that_were_sorted_by_a_clock_that_was_set_back_are_refused(tmp_path: Path) -> None:
    """Cycles were half as long. A job that was started again counts from 0 again, once."""
    rows = [(c + 1.0, c) for c in range(60)]
    for name, back, again in (("back", 20.0, False), ("again", 0.0, True)):
        late = [(t - back * (c > 30), c - 31 * (again and c > 30)) for t, c in rows]
        text = "seconds,worker,clock\n" + "".join(f"{t},0,{c}\n" for t, c in sorted(late, key=lambda row: row[0]))
        (tmp_path / name).mkdir()
        if again:
            converted(tmp_path / name, iterations_csv=text)
            continue
        with pytest.raises(
            TraceError, match=r"clocks of worker 0 of run 'mine' go back 1\d times while seconds go on: was a"
        ):
            converted(tmp_path / name, iterations_csv=text)


def test_columns_are_filled_with_what_the_whole_setting_tells(tmp_path: Path) -> None:
    """Calibration left such settings out, and the conversion had said nothing. What it does not tell stays empty."""
    trace = converted(tmp_path, settings_csv=f"seconds,setting\n0,{NODES}\n1,\n", iterations_csv=ITERATIONS)
    columns = ("workers", "servers", "policy", "batch_size", "staleness")
    assert scan(trace, "settings").select(columns).collect().rows() == [(2, 1, "asp", 32, None), (None,) * 5]


def test_a_change_that_took_no_time_has_a_row_of_its_own(tmp_path: Path) -> None:
    """Our own recorder writes two settings at a second where a tuner changed the first one before the job went on."""
    settings = SETTINGS + "0,2,1,32,bsp\n"
    trace = converted(tmp_path, settings_csv=settings, reconfigurations_csv="seconds,total_seconds\n0,0\n")
    assert scan(trace, "settings").collect()["policy"].to_list() == ["asp", "bsp"]


def test_runs_and_nodes_may_be_called_as_what_was_not_recorded(tmp_path: Path) -> None:
    """NA may be North America. In other columns it means: not recorded."""
    trace = converted(tmp_path, runs_csv="run,workload,seconds\nNA,NA,5\nnone,cnn,nan\n")
    assert scan(trace, "runs").select("run", "workload", "seconds").collect().rows() == [
        ("NA", None, 5.0),
        ("none", "cnn", None),
    ]


def test_a_table_in_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    """It was left out without a word, and calibration used what else there was. Other folders may be there."""
    for name, file in (("notes", "ideas.csv"), ("host1", "iterations.csv")):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / file).write_text(ITERATIONS)
    (tmp_path / "mine" / "settings.csv").write_text(SETTINGS)
    with pytest.raises(TraceError, match=r"host1/iterations.csv: it would be left out: put every table into the folder"):
        from_tables(tmp_path / "mine", tmp_path / "trace", made_by="test")


def test_durations_that_are_negative_by_rounding_are_zero(tmp_path: Path) -> None:
    """Waiting is often written as the rest of a step, a difference of floats: 0.3 - 0.1 - 0.2 is below 0."""
    rows = f"seconds,worker,clock,wait_seconds\n1,0,0,{0.3 - 0.1 - 0.2}\n2,0,1,-2.4e-7\n3,0,2,\n4,0,3,0.5\n"
    pushes = scan(converted(tmp_path, iterations_csv=rows, settings_csv=SETTINGS), "iterations").collect()
    assert pushes["wait_seconds"].to_list() == [0.0, 0.0, None, 0.5]


def test_a_summary_tells_of_iterations_that_cannot_have_computed_so_long(tmp_path: Path) -> None:
    """Outliers of a log. Whole seconds are no such: two iterations of 0.9 s may end in the same second."""
    times = [0.9, 0.9, 9.0, 0.9, 0.9]
    rows = "".join(f"fine,{0.95 * (c + 1)},0,{c},{t}\n" for c, t in enumerate(times))
    rows += "".join(f"whole,{int(0.95 * (c + 1))},0,{c},0.9\n" for c in range(5))
    trace = converted(tmp_path, iterations_csv="run,seconds,worker,clock,compute_seconds\n" + rows)
    found = summarise(trace).impossible
    assert found.select("run", "worker", "clock", "compute_seconds").rows() == [("fine", 0, 2, 9.0)]
    assert found["since"][0] == pytest.approx(0.95)


def test_numbers_of_workers_may_have_gaps(tmp_path: Path) -> None:
    """As ranks of a larger job have them. Nodes that have names may be more than ever work at a time."""
    ranks = ITERATIONS.replace(",1,", ",60,")
    assert check_trace(converted(tmp_path, iterations_csv=ranks, settings_csv=SETTINGS))["iterations"] == 20
    for shipped in ("bytedance-straggler", "homogeneous"):
        to_csv(locate(f"shipped:{shipped}"), tmp_path / shipped)
        from_tables(tmp_path / shipped, tmp_path / f"{shipped}-again", made_by="a test")


def test_whole_numbers_with_a_fraction_of_zeros_and_policies_of_tensorflow(tmp_path: Path) -> None:
    """As a program writes numbers whose column has a gap; a policy that nobody here knows stays as it is."""
    words = ["sync", "Async", "SYNCHRONOUS", "ASP", "ring", ""]
    rows = "".join(f"r{i},0,{i + 1}.0,2.00,{word}\n" for i, word in enumerate(words))
    trace = converted(tmp_path, settings_csv=f"run,seconds,workers,servers,policy\n{rows}", notes_txt="mine")
    found = scan(trace, "settings").collect()
    assert found["workers"].to_list() == [1, 2, 3, 4, 5, 6]
    assert found["servers"].to_list() == [2] * 6
    assert found["policy"].to_list() == ["bsp", "asp", "bsp", "asp", "ring", None]


def test_the_command_says_which_times_are_impossible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iterations.csv").write_text(ITERATIONS.replace("0.2,\n", "40,\n", 2).replace("40", "0.2", 1))
    assert main(["trace", "convert", str(tmp_path / "iterations.csv"), "--out", str(tmp_path / "one")]) == 0
    said = "note: 1 iteration cannot have computed as long as the trace says. The first: run"
    assert said in capsys.readouterr().out


def test_the_command_says_which_policies_calibration_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calibration was the first to say so. Tables of recorded runs may have any policy, so it is not refused."""
    policies = ("ssp3", "ssp3", "stale", "ssp", "asp", "")
    rows = "".join(f"r{i},0,2,1,{policy}\n" for i, policy in enumerate(policies))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.csv").write_text(f"run,seconds,workers,servers,policy\n{rows}")
    assert main(["trace", "convert", str(tmp_path / "mine"), "--out", str(tmp_path / "t")]) == 0
    said = capsys.readouterr().out
    assert "note: calibration does not know the policy 'ssp3' (2 settings), 'stale' (1 setting), and leaves its" in said
    assert "note: calibration leaves out settings that do not tell the bound of their policy, as those of 'ssp' (1 s" in said


def test_the_command_converts_a_folder_or_a_single_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "iterations.csv").write_text(ITERATIONS)
    assert main(["trace", "convert", str(tmp_path / "iterations.csv"), "--out", str(tmp_path / "one")]) == 0
    said = capsys.readouterr().out
    assert "20 rows of 1 run\n" in said  # what was read
    assert "20 iterations of 2 workers, " in said
    (tmp_path / "arrays").mkdir()
    (tmp_path / "arrays" / "iterations.json").write_text("[]")
    assert main(["trace", "convert", str(tmp_path / "arrays"), "--out", str(tmp_path / "none")]) == 2
    assert "write the table as CSV or as JSON lines, iterations.csv or .jsonl." in capsys.readouterr().err
    assert main(["trace", "check", str(tmp_path / "one")]) == 0
    assert "20 rows" in capsys.readouterr().out
    assert main(["calibrate", str(tmp_path / "one"), "--out", str(tmp_path / "c.toml")]) == 2
    assert "Record the numbers of workers and servers" in capsys.readouterr().err


def test_tables_that_were_not_converted_are_no_trace(tmp_path: Path) -> None:
    (tmp_path / "iterations.csv").write_text(ITERATIONS)
    with pytest.raises(ValueError, match=r"it has tables of your own\. Make a trace of them with `harness trace convert"):
        origin(tmp_path)
