"""Own checks: SQL files of the user's that run as jobs of an audit.

    -- Commands that waited for more than a day
    -- severity: warning
    -- advice: ask the recipient
    SELECT message_id, recipient FROM deliveries WHERE written_at - staged_at > INTERVAL 1 DAY

Each ``NAME.sql`` of ``audit.d`` in the home, or of the folder of ``--checks``, is one SELECT, and
becomes the job ``own.NAME``; each of its rows is a finding. A file that cannot be used is a job
that cannot run, so that it is named, and no other job is affected. A check is a program of its
owner: Spark's SELECT can start others, and read any file. Only files of this user are
read, and ``audit.d`` only of a home that others cannot enter.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from relay.audit.formats import JOURNAL, MODES, STORED_MESSAGE, register, subset
from relay.audit.home_files import UNREAD
from relay.audit.jobs import JOBS, AuditJob
from relay.audit.jobs.job import Tables, Written
from relay.audit.jobs.sql_files import ERROR, SEVERITY, WARNING, Header, read_header
from relay.audit.lake_columns import ACOMM, FINDING, LEDGER, LEDGER_PREFIX, RESULTS
from relay.audit.lake_tables import SOURCES, Inputs, conform
from relay.audit.sources.store_files import MESSAGE_SECTIONS
from relay.audit.spark_errors import first_line
from relay.base import fsio
from relay.base.clock import NS_PER_US
from relay.base.discovery import Found
from relay.base.errors import InvalidName, RelayError, UnsafePath
from relay.base.text import did_you_mean

OWN = "own"  # on the command line: all of them
FOLDER = "audit.d"
SUFFIX = ".sql"
MOST_BYTES = 1 << 20  # of a file
RESULT = "result_"  # before the name of a job's table

ROW = RESULTS["own_check"]
NOT_IN_LAKE = frozenset(ACOMM.names)  # few queries read them
NAMED = ("message_id", "agent", "route", "path")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_LINE = re.compile(r"\bline (\d+),? pos")
_COMMENT = re.compile(r"^\s*--.*$", re.MULTILINE)
_KEPT = re.compile(r"\b(?:store_\w+|journal)\b", re.IGNORECASE)
_FIRST_WORD = re.compile(r"(?:\s|--.*$|/\*[\s\S]*?\*/|\()*([^\s(]*)", re.MULTILINE)


def select(home: str, folder: str | None, names: Sequence[str]) -> list[AuditJob]:
    """Return the own checks to run: all unless jobs are named, and in any case those of ``folder``.

    Errors: InvalidName for a name without a file; RelayError when ``folder`` cannot be listed.
    """
    found = find(home, folder)
    named = [name for name in names if is_own(name)]
    for name in named:
        if name not in (OWN, *found) or not found:
            raise InvalidName(
                f"unknown job {name}: there is no file for it in {os.path.join(home, FOLDER)}",
                hint=did_you_mean(name, found) or "`relay audit list` shows the own checks",
            )
    if not names or OWN in named:
        return list(found.values())
    given = _listed(folder) if folder is not None else {}
    return [job for name, job in found.items() if name in named or name in given]


def is_own(name: str) -> bool:
    """Return True for the name of an own check, and for the one of all."""
    return name == OWN or name.startswith(f"{OWN}.")


def find(home: str, folder: str | None = None) -> dict[str, AuditJob]:
    """Find the own checks of a home, and of another folder: name -> job, in order of name.

    Errors: RelayError when ``folder`` cannot be listed.
    """
    own = os.path.join(home, FOLDER)
    problem = Found(home, "").problem if os.path.isdir(own) else ""
    files = _listed(own) if os.path.isdir(own) else {}
    refused = f"the home {problem}" if problem else ""
    jobs = {name: _job(name, path, refused) for name, path in files.items()}
    for name, path in (_listed(folder) if folder is not None else {}).items():
        twice = f"{files[name]} has the same name" if name in files else ""
        jobs[name] = _job(name, path, twice)
    return dict(sorted(jobs.items()))


def _listed(folder: str) -> dict[str, str]:
    try:
        names = [name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except OSError as exc:
        raise RelayError(f"{folder} cannot be listed: {exc.strerror}", hint="see --checks") from exc
    files = {}
    for name in sorted(names):
        stem = name.removesuffix(SUFFIX)
        safe = re.sub(r"[^\w-]", "_", stem, flags=re.ASCII)  # of a name that is refused below
        files[f"{OWN}.{safe}"] = os.path.join(folder, name)
    return files


def _job(name: str, path: str, problem: str) -> AuditJob:
    """Make the job of a file; one that cannot be used cannot run."""

    def counts(tables: Written) -> dict[str, int]:
        return {"rows": tables[name].count_rows()}

    try:
        if problem:
            raise UnsafePath(problem)
        header, sql = read_check(path)
    except (RelayError, OSError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        header, make = Header(f"cannot run: {reason}", {}), partial(_refuse, reason)
        return AuditJob(name, header, {name: ROW}, counts, make, source=path)
    found = partial(_findings, name, header.value(SEVERITY))
    made = partial(_make, name, sql)
    return AuditJob(
        name,
        header,
        {name: ROW},
        counts,
        made,
        findings=found,
        source=path,
        reads_kept=_KEPT.search(_COMMENT.sub("", sql)) is not None,
    )


def read_check(path: str) -> tuple[Header, str]:
    """Read a file: its header, and all of it.

    Errors: RelayError when it is not a check, or not a file of this user alone; OSError.
    """
    stem = os.path.basename(path).removesuffix(SUFFIX)
    if not _NAME.fullmatch(stem):
        raise RelayError("its name may have letters, digits, - and _ only")
    data, _ = fsio.read_regular(path, None, MOST_BYTES + 1, narrow=False)
    if len(data) > MOST_BYTES:
        raise RelayError(f"larger than {MOST_BYTES:,} bytes")
    try:
        sql = data.decode()
    except UnicodeDecodeError as exc:
        raise RelayError("not UTF-8 text") from exc
    header = read_header(sql)
    severity = header.value(SEVERITY)
    if severity not in (ERROR, WARNING):
        raise RelayError(f"severity: expected {ERROR} or {WARNING}, got {severity or 'nothing'}")
    match = _FIRST_WORD.match(sql)
    first = match[1] if match else ""
    if first.upper() not in ("SELECT", "WITH"):
        raise RelayError(f"expected a SELECT, got {first or 'nothing'}")
    return header._replace(title=header.title or stem), sql


def _refuse(reason: str, inputs: Inputs) -> Tables:
    raise RelayError(reason)


def _make(name: str, sql: str, inputs: Inputs) -> Tables:
    rows = _query(sql, inputs)
    of = {column.lower(): f"_{at}" for at, column in enumerate(rows.columns)}
    numbered = rows.toDF(*[f"_{at}" for at in range(len(rows.columns))])
    parts = [
        part
        for at, column in enumerate(rows.columns)
        if column.lower() not in NAMED
        for part in (F.lit(column), _text(f"_{at}"))
    ]
    detail = F.create_map(*parts) if parts else F.create_map().cast("map<string,string>")
    named = [(_text(of[name]) if name in of else F.lit(None)).alias(name) for name in NAMED]
    known = F.map_filter(detail, lambda _, value: value.isNotNull()).alias("detail")
    return {name: conform(numbered.select(*named, known), ROW)}


def _text(column: str) -> Column:
    """A column as text, which the bytes of a message's content may not be."""
    return F.make_valid_utf8(F.col(column).cast("string"))


def _query(sql: str, inputs: Inputs) -> DataFrame:
    """Analyse the SELECT over the views that it names.

    Inside of parentheses Spark's grammar knows queries alone: WITH … INSERT is not one. The views
    are needed until the query is analysed. Errors: RelayError with Spark's reason, and the line.
    """
    code = _COMMENT.sub("", sql)
    text = sql.rstrip().removesuffix(";")
    made = []
    try:
        for name, make in VIEWS.items():
            if _names(code, name):
                make(inputs, code).createTempView(name)
                made.append(name)
        return inputs.spark.sql(f"SELECT * FROM (\n{text}\n)")
    except AnalysisException as exc:  # of the parser, too
        line = _LINE.search(str(exc))
        where = f"line {int(line[1]) - 1}: " if line else ""
        hint = "docs/audit.md, section Own checks, lists the tables"
        raise RelayError(f"{where}{first_line(str(exc)).rstrip('.')}", hint=hint) from exc
    finally:
        for name in made:
            inputs.spark.catalog.dropTempView(name)


def _names(code: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", code, re.IGNORECASE) is not None


def _table(table: str, inputs: Inputs, code: str) -> DataFrame:
    return inputs.table(table).drop("bucket")


def _messages(inputs: Inputs, code: str) -> DataFrame:
    """The store's messages, from its files if the lake lacks a column that is named."""
    rows = inputs.table("store_messages")
    names = [x for x in STORED_MESSAGE.names if x not in NOT_IN_LAKE or _names(code, x)]
    if NOT_IN_LAKE.isdisjoint(names):
        return rows.select(*names)
    options = {"section": ",".join(MESSAGE_SECTIONS)}
    schema = subset(STORED_MESSAGE, names, "the store")
    frame = _load(inputs, "acomm", schema, inputs.snapshot.store_files, options)
    return _below(frame, "file", inputs.snapshot.folder, inputs.snapshot.home)


def _files(inputs: Inputs, code: str) -> DataFrame:
    rows = inputs.table("files").where(~F.col("kind").isin("ledger", "pack", UNREAD))
    return rows.drop("read_at")


def _journal(inputs: Inputs, code: str) -> DataFrame:
    """The records that a query needs columns of."""
    names = [name for name in JOURNAL.names if "*" in code or _names(code, name)]
    journal = inputs.snapshot.journal
    options = {"until": json.dumps(journal.until)}
    named = {"objects": journal.settings.objects, "key_file": journal.settings.key_file}
    options |= {name: value for name, value in named.items() if value}
    inputs.require_whole(*SOURCES["journal"])
    schema = subset(JOURNAL, names, "the journal")
    frame = _load(inputs, "aof2", schema, journal.until, options)
    return _below(frame, "stream", inputs.snapshot.home)


def _load(
    inputs: Inputs, name: str, schema: StructType, paths: Iterable[str], options: dict[str, str]
) -> DataFrame:
    """Read by a format of the audits; a run that needs none does not register them."""
    register(inputs.spark)
    options |= {"paths": json.dumps([glob.escape(path) for path in paths])}
    reader = inputs.spark.read.format(name).schema(schema)
    return reader.options(mode=MODES[not inputs.strict], **options).load()


def _below(frame: DataFrame, column: str, *folders: str) -> DataFrame:
    """Make the paths of a column relative to the folders, if the frame has it."""
    for folder in folders if column in frame.columns else ():
        prefix = F.lit(os.path.join(folder, ""))
        rest = F.substr(column, F.length(prefix) + F.lit(1))
        is_below = F.col(column).startswith(prefix)
        frame = frame.withColumn(column, F.when(is_below, rest).otherwise(F.col(column)))
    return frame


def _result(job: str, table: str, schema: pa.Schema, inputs: Inputs, code: str) -> DataFrame:
    if not os.path.isdir(os.path.join(inputs.results, table)):
        raise RelayError(f"{RESULT}{table} needs the job {job} in the same run, without an error")
    return inputs.result(table, schema)


_STORED = ("deliveries", "channels", "subscriptions")
View = Callable[[Inputs, str], DataFrame]  # from the SQL, which tells rare columns
VIEWS: Mapping[str, View] = {
    **{table: partial(_table, f"{LEDGER_PREFIX}{table}") for table in LEDGER},
    **{f"store_{name}": partial(_table, f"store_{name}") for name in _STORED},
    "store_messages": _messages,
    "journal": _journal,
    "originals": partial(_table, "originals"),
    "files": _files,
    **{
        f"{RESULT}{table}": partial(_result, job.name, table, schema)
        for job in JOBS.values()
        for table, schema in job.tables.items()
    },
}


def _findings(name: str, severity: str, inputs: Inputs) -> DataFrame | None:
    if not inputs.written(name).count_rows():
        return None
    rows = inputs.result(name, ROW).select(
        F.lit(name).alias("check"),
        F.lit(severity).alias("severity"),
        "*",
        F.timestamp_micros(F.lit(inputs.snapshot.ledger.taken_ns // NS_PER_US)).alias(
            "observed_at"
        ),
    )
    return conform(rows, FINDING)
