"""The reference pages say what the code says, and everything in the code has a description."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvscope import events, frame, labels, query, samples, schema, settings, steps

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_stale(generate: ModuleType) -> None:
    assert generate.stale() == [], "run `make docs`"


def test_a_stale_or_missing_page_is_named(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    for name, make in generate.PAGES.items():
        (tmp_path / name).write_text(make(), "utf-8")
    assert generate.stale() == []
    (tmp_path / "steps.md").write_text("edited by hand")
    (tmp_path / "ring.md").unlink()
    assert generate.stale() == ["steps.md", "ring.md"]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("events.md", [e.name for e in events.VOCABULARY.values()]),
        ("events.md", [field for e in events.VOCABULARY.values() for field in e.fields]),
        ("steps.md", [step.name for step in steps.STEPS]),
        ("schema.md", [column.name for table in schema.TABLES for column in table.columns]),
        ("samples.md", list(samples.KINDS)),
        ("api.md", [*frame.Scope.__struct_fields__, *frame.Frame.__struct_fields__]),
        ("api.md", [*frame.RequestRow.__struct_fields__, *frame.Engine.__struct_fields__]),
        ("api.md", [*labels.Change.__struct_fields__, *labels.Label.__struct_fields__]),
        ("settings.md", [name for s in settings.listed() for name in (s.name, s.flag, s.variable)]),
        ("queries.md", [column for q in query.questions().values() for column in q.columns]),
    ],
)
def test_every_name_is_on_its_page(page: str, names: list[str]) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert names
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_event_and_field_is_described() -> None:
    for event in events.VOCABULARY.values():
        assert event.doc.strip(), event.name
        assert event.source in (events.SCHEDULER, events.WORKER, events.EITHER), event.name
        for field, doc in event.fields.items():
            assert doc.strip(), f"{event.name} {field}"


def test_every_step_is_described_and_has_one_class_and_stage() -> None:
    for step in steps.STEPS:
        assert step.doc.strip(), step.name
        assert step.class_ in steps.CLASSES, step.name
        assert step.stage in (*steps.STAGES, "unknown"), step.name


def test_every_table_column_setting_and_question_is_described() -> None:
    for table in schema.TABLES:
        assert table.doc.strip(), table.name
        assert all(column.doc.strip() for column in table.columns), table.name
    assert all(setting.doc.strip() for setting in settings.listed())
    assert all(kind.doc.strip() and kind.unit for kind in samples.KINDS.values())
    for question in query.questions().values():
        assert question.description.strip(), question.name
        assert all(doc.strip() for doc in question.columns.values()), question.name


def test_every_variable_that_an_engine_reads_is_documented() -> None:
    sources = [*(ROOT / "connectors").glob("*.py"), ROOT / "kvscope" / "ring.py"]
    read = {name for path in sources for name in re.findall(r'"(KVSCOPE_\w+)"', path.read_text())}
    assert read - {"KVSCOPE_TEST_RAISE"} == set(settings.ENGINE_VARIABLES)


@pytest.mark.parametrize("doc", ["", "  "])
def test_an_event_field_without_a_description_fails(
    generate: ModuleType, monkeypatch: pytest.MonkeyPatch, doc: str
) -> None:
    event = events.EventType(999, "new.event", events.WORKER, "Something new.", {"count": doc})
    monkeypatch.setitem(events.VOCABULARY, 999, event)
    with pytest.raises(generate.Undocumented, match="0 `count`: no meaning"):
        generate.events_page()


def test_a_slot_field_without_a_description_fails(generate: ModuleType) -> None:
    with pytest.raises(generate.Undocumented, match="3 fields and 2 descriptions"):
        generate.layout("<HHI", 0, ("kind", "code"), ("chunk", "piece"))
