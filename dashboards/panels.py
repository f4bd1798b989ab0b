"""Panels as all dashboards have them; units and colours are decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    nodegraph,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as d
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvscope import steps
from kvscope.dashboards.links import Link
from kvscope.dashboards.sources import JAEGER, PROMETHEUS

Panel = Builder[d.Panel]

CLASS_COLOURS = {
    steps.COMPUTE: "green",
    steps.CAPACITY: "yellow",
    steps.TRANSFER: "blue",
    steps.COORDINATION: "red",
    steps.UNKNOWN: "purple",
}
"""As `kvscope top` shows them."""
GOOD, WARN, BAD, NEUTRAL = "green", "orange", "red", "text"

SECONDS, PERCENT, COUNT, BYTES, BYTES_PER_S = "s", "percentunit", "locale", "bytes", "Bps"
REQUESTS_PER_S, PER_S, TOKENS_PER_S = "reqps", "cps", "cps"
COUNTED = "How many in the rate interval around each point."
"""Of rare things: a rate of 0.02 per second says little."""

SOFT_TOPS = {
    SECONDS: 0.001,
    PERCENT: 0.01,
    COUNT: 1,
    BYTES: 1024,
    BYTES_PER_S: 1024,
    REQUESTS_PER_S: 0.1,
    PER_S: 1,
}
"""Least ends of axes: Grafana takes any for a graph of zeros, such as 10,000 % or 100 requests."""
LEGEND_AS_TABLE = 12
"""From this width on the legend stands to the right, with figures. Below a graph it would show three rows."""
SPAN_WIDTH = 64
"""Pixels of a 24th of the page where that is 1600 wide."""
ARROW = "→"
"""Between the engines of a pair."""
NAME_SIZE, BAR_VALUE_SIZE = 13, 16
"""Pixels. Left to itself Grafana writes as large as there is room, and cuts off the names."""
FIGURE_WIDTH, LETTER_WIDTH, HEADER_PADDING, NAME_WIDTH, ENGINE_WIDTH = 80, 8, 32, 80, 230
"""Pixels of a table's columns; left to itself Grafana takes at least 150 for each, and cuts off the last."""


class Query(NamedTuple):
    """One expression of a panel."""

    expr: str
    legend: str = ""
    exemplar: bool = False


class Limit(NamedTuple):
    """From this value on, this colour."""

    value: float | None
    colour: str


def limits(*at: float, least: bool = False) -> list[Limit]:
    """Good below the first, bad from the last on; with one limit nothing is merely a warning.

    Args:
        least: the other way round: bad below the first.
    """
    colours = [GOOD, *([WARN] if len(at) > 1 else []), BAD]
    values: list[float | None] = [None, *at]
    return [Limit(v, k) for v, k in zip(values, reversed(colours) if least else colours, strict=True)]


NO_LIMITS = [Limit(None, NEUTRAL)]


class _DataLink(d.DashboardLink):
    """A link of a panel's values: the SDK has only the type of a dashboard's links, which says more."""

    def __init__(self, link: Link) -> None:
        super().__init__(title=link.title, url=link.url, target_blank=link.new_tab)

    def to_json(self) -> dict[str, object]:
        return {"title": self.title, "url": self.url, "targetBlank": self.target_blank}


class _Built(Builder[d.DashboardLink]):
    def __init__(self, link: Link) -> None:
        self._link = link

    def build(self) -> d.DashboardLink:
        return _DataLink(self._link)


# --- panels ---------------------------------------------------------------------------------------------


def graph(
    id_: int,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    span: int = 12,
    height: int = 8,
    stacked: bool = False,
    colours: Mapping[str, str] | None = None,
    links: Sequence[Link] = (),
    thresholds: Sequence[Limit] = (),
    greatest: float | None = None,
    soft_top: float | None = None,
    signed: bool = False,
) -> Panel:
    """Lines over time.

    Args:
        stacked: for parts of a whole only: they must add up.
        colours: by regular expression of the legend.
        thresholds: drawn as dashed lines.
        greatest: end of the axis.
        soft_top: least end of the axis, where that of the unit (`SOFT_TOPS`) does not fit.
        signed: values may be negative.
    """
    panel = (
        timeseries.Panel()
        .legend(_legend(span, pairs=any(ARROW in query.legend for query in queries)))
        .tooltip(common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(c.SortOrder.DESCENDING))
        .line_width(1)
        .fill_opacity(60 if stacked else 0)
        .show_points(c.VisibilityMode.AUTO)
        .span_nulls(False)
        .color_scheme(build.FieldColor().mode(d.FieldColorModeId.PALETTE_CLASSIC))
        .thresholds(_thresholds(thresholds or NO_LIMITS))
    )
    if thresholds:
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(c.GraphThresholdsStyleMode.DASHED))
    if stacked:
        panel.stacking(common.StackingConfig().mode(c.StackingMode.NORMAL).group("A"))
    if greatest is not None:
        panel.max(greatest)
    else:
        panel.axis_soft_max(SOFT_TOPS[unit] if soft_top is None else soft_top)
    if not signed:
        panel.min(0)
    for pattern, colour in (colours or {}).items():
        panel.override_by_regexp(f"/^{pattern}$/", [_fixed(colour)])
    _finish(panel, id_, title, description, unit, span, height, links)
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        target = _target(ref_id, query).range()
        panel.with_target(target.exemplar(True) if query.exemplar else target)
    return panel


def _legend(span: int, pairs: bool) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True)
    if span < LEGEND_AS_TABLE or pairs:  # beside the graph, names of pairs would take most of the panel
        return legend.display_mode(c.LegendDisplayMode.LIST).placement(c.LegendPlacement.BOTTOM).calcs([])
    return (
        legend.display_mode(c.LegendDisplayMode.TABLE)
        .placement(c.LegendPlacement.RIGHT)
        .calcs(["mean"] if span == LEGEND_AS_TABLE else ["mean", "max"])
        .sort_by("Mean")
        .sort_desc(True)
    )


def number(
    id_: int,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    span: int = 4,
    height: int = 4,
    thresholds: Sequence[Limit] = NO_LIMITS,
    links: Sequence[Link] = (),
    thresholds_of: Mapping[str, Sequence[Limit]] | None = None,
    decimals: int | None = None,
    no_value: str = "",
    words: Mapping[int, tuple[str, str]] | None = None,
) -> Panel:
    """A big number over all that the dashboard shows, or one with its name for each series that has a legend.

    Args:
        thresholds_of: by regular expression of the legend.
        words: text and colour that stand instead of a value.
    """
    named = any(query.legend for query in queries)
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .color_mode(c.BigValueColorMode.VALUE)
        .graph_mode(c.BigValueGraphMode.NONE)
        .text_mode(c.BigValueTextMode.VALUE_AND_NAME if named else c.BigValueTextMode.AUTO)
        .thresholds(_thresholds(thresholds))
        .color_scheme(build.FieldColor().mode(d.FieldColorModeId.THRESHOLDS))
    )
    if named:
        panel.text(common.VizTextDisplayOptions().title_size(NAME_SIZE))
    if no_value:
        panel.no_value(no_value)
    if decimals is not None:
        panel.decimals(decimals)
    if words:
        told = {str(value): d.ValueMappingResult(text, colour) for value, (text, colour) in words.items()}
        panel.mappings([d.ValueMap(told)])
    for pattern, those in (thresholds_of or {}).items():
        value = d.DynamicConfigValue("thresholds", _thresholds(those).build())
        panel.override_by_regexp(f"/^{pattern}$/", [value])
    _finish(panel, id_, title, description, unit, span, height, links)
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel.with_target(_target(ref_id, query).instant())
    return panel


def bars(
    id_: int,
    title: str,
    description: str,
    unit: str,
    queries: Sequence[Query],
    *,
    span: int = 8,
    height: int = 8,
    thresholds: Sequence[Limit] = NO_LIMITS,
    colours: Mapping[str, str] | None = None,
    links: Sequence[Link] = (),
    greatest: float | None = None,
    decimals: int | None = None,
    many: bool = False,
    no_value: str = "",
) -> Panel:
    """A bar for each series, over all that the dashboard shows; never of what may be negative.

    A bar that is alone has no name: where that matters take `number` or `rows`.

    Args:
        many: more than about five: names stand beside the bars, not above.
    """
    # Beside a bar Grafana makes room for names of the size that it chooses itself.
    text = common.VizTextDisplayOptions().value_size(BAR_VALUE_SIZE)
    panel = (
        bargauge.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .orientation(c.VizOrientation.HORIZONTAL)
        .display_mode(c.BarGaugeDisplayMode.BASIC)
        .value_mode(c.BarGaugeValueMode.TEXT)
        .name_placement(c.BarGaugeNamePlacement.LEFT if many else c.BarGaugeNamePlacement.TOP)
        .text(text if many else text.title_size(NAME_SIZE))
        .min(0)
        .show_unfilled(True)
        .thresholds(_thresholds(thresholds))
        .color_scheme(build.FieldColor().mode(d.FieldColorModeId.THRESHOLDS))
    )
    if greatest is not None:
        panel.max(greatest)
    if decimals is not None:
        panel.decimals(decimals)
    if no_value:
        panel.no_value(no_value)
    for pattern, colour in (colours or {}).items():
        panel.override_by_regexp(f"/^{pattern}$/", [_fixed(colour)])
    _finish(panel, id_, title, description, unit, span, height, links)
    for ref_id, query in zip(_REF_IDS, queries, strict=False):
        panel.with_target(_target(ref_id, query).instant())
    return panel


class Column(NamedTuple):
    """A column of figures in a table; `expr` has the labels of the table's rows."""

    title: str
    expr: str
    unit: str
    thresholds: Sequence[Limit] = ()


def rows(
    id_: int,
    title: str,
    description: str,
    keys: Mapping[str, str],
    columns: Sequence[Column],
    *,
    sort: str,
    span: int = 24,
    height: int = 9,
    links: Mapping[str, Sequence[Link]] | None = None,
    hidden: Sequence[str] = (),
) -> Panel:
    """A table over all that the dashboard shows: a row for each set of labels, a column for each expression.

    Args:
        keys: titles by label, in order.
        sort: title of the column by which it is sorted, the greatest first.
        links: by title of a column.
        hidden: titles of columns that only serve to make the rows.
    """
    panel = (
        table.Panel()
        .show_header(True)
        .cell_height(c.TableCellHeight.SM)
        .filterable(False)
        .min_width(NAME_WIDTH)
        .thresholds(_thresholds(NO_LIMITS))
    )
    values = {_value_name(i, len(columns)): column.title for i, column in enumerate(columns)}
    names = {**keys, **values}
    out = ["Time", *(name for name, shown in values.items() if shown in hidden)]
    panel.with_transformation(d.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        d.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(out, True),
                "indexByName": {name: i for i, name in enumerate(["Time", *names])},
                "renameByName": names,
            },
        )
    )
    panel.with_transformation(
        d.DataTransformerConfig(
            id_val="sortBy", options={"fields": {}, "sort": [{"field": sort, "desc": True}]}
        )
    )
    for column in columns:
        panel.override_by_name(column.title, _column_properties(column))
    # Columns without a width share what those with one leave, however long their names.
    share = (span * SPAN_WIDTH - sum(map(_width, columns))) / len(keys)
    for label, shown in keys.items():
        if label.endswith("engine") and len(keys) > 1 and share < ENGINE_WIDTH:
            panel.override_by_name(shown, [d.DynamicConfigValue("custom.width", ENGINE_WIDTH)])
    for name, those in (links or {}).items():
        panel.override_by_name(name, [d.DynamicConfigValue("links", [_DataLink(link) for link in those])])
    # Without a unit: it would be put after names that are numbers, too.
    _finish(panel, id_, title, description, "", span, height, ())
    for ref_id, column in zip(_REF_IDS, columns, strict=False):
        panel.with_target(_target(ref_id, Query(column.expr)).instant().format(PromQueryFormat.TABLE))
    return panel


def _value_name(number_: int, count: int) -> str:
    return f"Value #{_REF_IDS[number_]}" if count > 1 else "Value"


def _width(column: Column) -> int:
    return max(FIGURE_WIDTH, len(column.title) * LETTER_WIDTH + HEADER_PADDING)


def _column_properties(column: Column) -> list[d.DynamicConfigValue]:
    decimals = 0 if column.unit == COUNT else 1
    properties = [
        d.DynamicConfigValue("unit", column.unit),
        d.DynamicConfigValue("decimals", decimals),
        d.DynamicConfigValue("custom.width", _width(column)),
    ]
    if column.thresholds:
        properties += [
            d.DynamicConfigValue("thresholds", _thresholds(column.thresholds).build()),
            d.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        ]
    return properties


_REF_IDS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _target(ref_id: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().ref_id(ref_id).expr(query.expr).datasource(PROMETHEUS)
    return target.legend_format(query.legend) if query.legend else target


def _thresholds(those: Sequence[Limit]) -> build.ThresholdsConfig:
    return (
        build.ThresholdsConfig()
        .mode(d.ThresholdsMode.ABSOLUTE)
        .steps([d.Threshold(value=step.value, color=step.colour) for step in those])
    )


def _fixed(colour: str) -> d.DynamicConfigValue:
    return d.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def _finish(
    panel: Any,
    id_: int,
    title: str,
    description: str,
    unit: str,
    span: int,
    height: int,
    links: Sequence[Link],
) -> None:
    _place(panel, id_, title, description, PROMETHEUS, span, height)
    if unit:
        panel.unit(unit)
    if links:
        panel.data_links([_Built(link) for link in links])


def _place(
    panel: Any, id_: int, title: str, description: str, source: c.DataSourceRef, span: int, height: int
) -> None:
    panel.id(id_).title(title).description(" ".join(description.split()))
    panel.datasource(source).span(span).height(height)


# --- panels on traces -----------------------------------------------------------------------------------


class _JaegerQuery(Dataquery, Builder[Dataquery]):
    """A query to Grafana's Jaeger source, for which the SDK has no type."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def build(self) -> Dataquery:
        return self

    def to_json(self) -> dict[str, object]:
        return {"refId": "A", "datasource": JAEGER.to_json(), **self._fields}


def found_traces(id_: int, title: str, description: str, engine: str, *, height: int = 10) -> Panel:
    """A list of requests in which `engine` took part, each with a link to its waterfall."""
    panel = table.Panel().show_header(True).cell_height(c.TableCellHeight.SM)
    _place(panel, id_, title, description, JAEGER, 24, height)
    return panel.with_target(_JaegerQuery(queryType="search", service=engine, limit=50))


def one_trace(id_: int, title: str, description: str, trace_id: str, *, height: int = 16) -> Panel:
    """The waterfall of one request."""
    panel = build.Panel().type("traces")
    _place(panel, id_, title, description, JAEGER, 24, height)
    return panel.with_target(_JaegerQuery(query=trace_id))


def pairs_graph(id_: int, title: str, description: str, *, height: int = 14) -> Panel:
    """Engines as nodes, requests between them as edges."""
    panel = nodegraph.Panel()
    _place(panel, id_, title, description, JAEGER, 24, height)
    return panel.with_target(_JaegerQuery(queryType="dependencyGraph"))
