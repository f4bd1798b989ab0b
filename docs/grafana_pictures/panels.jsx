// Panels as Grafana's own plug-ins draw them, with the components of @grafana/ui that these use.

import React, { useLayoutEffect, useRef } from "react";
import {
  FieldColorModeId,
  FieldConfigOptionsRegistry,
  FieldConfigProperty,
  FieldType,
  VizOrientation,
  applyFieldOverrides,
  cacheFieldDisplayNames,
  displayNameOverrideProcessor,
  getDisplayProcessor,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  identityOverrideProcessor,
  numberOverrideProcessor,
  renderMarkdown,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  toDataFrame,
  transformDataFrame,
} from "@grafana/data";
import { BarGauge, BigValue, EventsCanvas, TimeSeries, VizRepeater } from "@grafana/ui";
import { TableNG } from "@grafana/ui/unstable";

import { NodeGraph, Traces } from "./jaeger.jsx";

standardTransformersRegistry.setInit(() =>
  // Some stand there twice, under an old name.
  [...new Map(Object.values(standardTransformers).map((one) => [one.id, one])).values()].map((transformation) => ({
    id: transformation.id,
    transformation: async () => transformation,
    name: transformation.name,
    editor: () => null,
    imageDark: "",
    imageLight: "",
  })),
);

// The field options that Grafana registers in its AGPL part: which there are, and how a value is taken over.
const STANDARD = {
  unit: stringOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  noValue: stringOverrideProcessor,
  fieldMinMax: identityOverrideProcessor,
  color: identityOverrideProcessor,
  thresholds: identityOverrideProcessor,
  mappings: identityOverrideProcessor,
  links: identityOverrideProcessor,
  filterable: identityOverrideProcessor,
};
const CUSTOM = [
  "drawStyle lineInterpolation lineWidth fillOpacity gradientMode lineStyle spanNulls insertNulls showPoints pointSize",
  "barAlignment barWidthFactor stacking axisPlacement axisLabel axisWidth axisSoftMin axisSoftMax axisGridShow",
  "axisColorMode axisBorderShow axisCenteredZero scaleDistribution hideFrom thresholdsStyle transform fillBelowTo",
  "align width minWidth cellOptions inspect filterable wrapText wrapHeaderText hidden",
].join(" ");

const fieldOptions = new FieldConfigOptionsRegistry(() => [
  ...Object.entries(STANDARD).map(([path, process]) => option(path, path, process, false)),
  ...CUSTOM.split(" ").map((path) => option(`custom.${path}`, path, identityOverrideProcessor, true)),
]);

function option(id, path, process, isCustom) {
  return { id, path, isCustom, process, name: path, shouldApply: () => true, editor: () => null, override: () => null, settings: {} };
}

const GRAPH = {
  drawStyle: "line",
  lineInterpolation: "linear",
  lineWidth: 1,
  fillOpacity: 0,
  gradientMode: "none",
  pointSize: 5,
  showPoints: "auto",
  barAlignment: 0,
  barWidthFactor: 0.6,
  axisPlacement: "auto",
  axisGridShow: true,
  axisColorMode: "text",
  axisBorderShow: false,
  scaleDistribution: { type: "linear" },
  hideFrom: { legend: false, tooltip: false, viz: false },
  stacking: { mode: "none", group: "A" },
  thresholdsStyle: { mode: "off" },
  spanNulls: false,
};
const CELL = { align: "auto", cellOptions: { type: "auto" }, inspect: false };
const COLOR = {
  timeseries: FieldColorModeId.PaletteClassic,
  stat: FieldColorModeId.Thresholds,
  bargauge: FieldColorModeId.Thresholds,
  table: FieldColorModeId.Thresholds,
};
const THRESHOLDS = { mode: "absolute", steps: [{ value: -Infinity, color: "green" }, { value: 80, color: "red" }] };

// The frames with transformations, units, thresholds, colours and names of the panel, ready to draw.
export async function prepared(panel, frames, theme, replace) {
  const transformations = (panel.transformations ?? []).filter((one) => !one.disabled);
  const data = await new Promise((next, error) =>
    transformDataFrame(transformations, frames.map((frame) => toDataFrame(frame))).subscribe({ next, error }),
  );
  const defaults = panel.fieldConfig?.defaults ?? {};
  const custom = panel.type === "timeseries" ? GRAPH : panel.type === "table" ? CELL : {};
  const fieldConfig = {
    defaults: {
      color: { mode: COLOR[panel.type] ?? FieldColorModeId.Thresholds },
      thresholds: THRESHOLDS,
      ...defaults,
      custom: { ...custom, ...defaults.custom },
    },
    overrides: panel.fieldConfig?.overrides ?? [],
  };
  const ready = applyFieldOverrides({
    data,
    fieldConfig,
    fieldConfigRegistry: fieldOptions,
    replaceVariables: replace,
    theme,
    timeZone: "utc",
  });
  cacheFieldDisplayNames(ready);
  return ready;
}

// What stands in a panel of a type; undefined for a type that is not known here.
export const DRAWN = { timeseries: Graph, stat: Stat, bargauge: Bars, table: Table, text: Text, traces: Traces, nodeGraph: NodeGraph };

export function hasData({ panel, data, trace, graph }) {
  return panel.type === "text" || trace || graph?.length || data.some((frame) => frame.length > 0 && frame.fields.some((field) => field.type !== FieldType.time));
}

function Graph({ panel, data, exemplars, width, height, timeRange, theme }) {
  const legend = { showLegend: true, displayMode: "list", placement: "bottom", calcs: [], ...panel.options?.legend };
  return (
    <TimeSeries frames={data} structureRev={1} timeRange={timeRange} timeZone="utc" {...{ width, height, legend }} options={panel.options}>
      {(config) => <Exemplars {...{ config, exemplars, theme }} />}
    </TimeSeries>
  );
}

// Stand-in: Grafana's exemplar markers are not in its library.
function Exemplars({ config, exemplars, theme }) {
  const plot = useRef();
  useLayoutEffect(() => config.addHook("init", (made) => (plot.current = made)), [config]);
  if (!exemplars.length) return null;
  const scale = config.getSeries()[0].props.scaleKey;
  const events = [
    toDataFrame({ fields: [{ name: "Time", values: exemplars.map((one) => one.at) }, { name: "Value", values: exemplars.map((one) => one.value) }] }),
  ];
  const at = (data, row) => {
    const { min, max } = plot.current?.scales[scale] ?? {};
    if (min == null || max == null) return undefined;
    const value = Math.min(Math.max(data.fields[1].values[row], min), max);
    return { x: plot.current.valToPos(data.fields[0].values[row], "x"), y: plot.current.valToPos(value, scale) };
  };
  return (
    <EventsCanvas id="exemplars" config={config} events={events} mapEventToXYCoords={at}
      renderEventMarker={() => (
        <div style={{ width: 7, height: 7, transform: "rotate(45deg)", background: theme.visualization.getColorByName("blue") }} />
      )}
    />
  );
}

function values(panel, data, theme, replace, options = {}) {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig ?? { defaults: {}, overrides: [] },
    reduceOptions: { calcs: ["lastNotNull"], values: false, ...panel.options?.reduceOptions },
    replaceVariables: replace,
    theme,
    data,
    timeZone: "utc",
    ...options,
  });
}

function Stat({ panel, data, width, height, timeRange, theme, replace }) {
  const options = panel.options ?? {};
  const graph = options.graphMode ?? "area";
  const textMode = (options.textMode ?? "auto") === "auto" && (panel.fieldConfig?.defaults?.displayName || !panel.title) ? "value_and_name" : options.textMode;
  return (
    <VizRepeater
      getValues={() => values(panel, data, theme, replace, { sparkline: graph !== "none" })}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all)}
      renderValue={({ value, alignmentFactors, width, height, count }) => (
        <BigValue
          value={value.display}
          sparkline={value.sparkline && { ...value.sparkline, timeRange }}
          colorMode={options.colorMode ?? "value"}
          graphMode={graph}
          justifyMode={options.justifyMode ?? "auto"}
          textMode={textMode}
          text={options.text}
          disableWideLayout={!(options.wideLayout ?? true)}
          {...{ alignmentFactors, width, height, count, theme }}
        />
      )}
      source={data}
      itemSpacing={3}
      renderCounter={0}
      autoGrid
      orientation={options.orientation ?? VizOrientation.Auto}
      {...{ width, height }}
    />
  );
}

function Bars({ panel, data, width, height, theme, replace }) {
  const options = panel.options ?? {};
  const manual = options.sizing === "manual";
  return (
    <VizRepeater
      getValues={() => values(panel, data, theme, replace)}
      getAlignmentFactors={(all) => getDisplayValueAlignmentFactors(all)}
      renderValue={({ value, alignmentFactors, width, height, orientation, count }) => (
        <BarGauge
          value={count === 1 && !panel.fieldConfig?.defaults?.displayName ? { ...value.display, title: undefined } : value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex ?? 0) ?? getDisplayProcessor({ field: { type: FieldType.number, config: value.field }, theme })}
          text={options.text}
          itemSpacing={options.displayMode === "lcd" ? 2 : 10}
          displayMode={options.displayMode ?? "gradient"}
          showUnfilled={options.showUnfilled ?? true}
          valueDisplayMode={options.valueMode ?? "color"}
          namePlacement={options.namePlacement ?? "auto"}
          alignmentFactors={count > 1 ? alignmentFactors : undefined}
          {...{ width, height, orientation, theme }}
        />
      )}
      source={data}
      renderCounter={0}
      minVizWidth={manual ? options.minVizWidth : 8}
      minVizHeight={manual ? options.minVizHeight : 16}
      maxVizHeight={manual ? options.maxVizHeight : 300}
      orientation={options.orientation ?? VizOrientation.Auto}
      {...{ width, height }}
    />
  );
}

function Table({ panel, data, width, height, timeRange }) {
  const options = panel.options ?? {};
  const frame = data[options.frameIndex ?? 0] ?? data[0];
  return (
    <TableNG data={frame} noHeader={options.showHeader === false} cellHeight={options.cellHeight ?? "sm"} sortBy={options.sortBy}
      fieldConfig={panel.fieldConfig} enableVirtualization={false} structureRev={1} {...{ width, height, timeRange }} />
  );
}

function Text({ panel }) {
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: renderMarkdown(panel.options?.content ?? "") }} />;
}
