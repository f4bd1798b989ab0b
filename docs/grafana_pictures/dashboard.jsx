// Draws one dashboard's JSON: the bar with its variables, rows, and the panels in their places.

import React from "react";
import { createRoot } from "react-dom/client";
import { createTheme, dateTime } from "@grafana/data";
import { GlobalStyles, Icon, PanelChrome, ThemeContext } from "@grafana/ui";
import "uplot/dist/uPlot.min.css";

import { jaeger } from "./jaeger.jsx";
import { filled, frames, variables } from "./prometheus.js";
import { DRAWN, hasData, prepared } from "./panels.jsx";

const CELL = 30;
const GAP = 8;
const MARGIN = 16;
const ROW_PADDING = 16;

// Draws `dashboard` with what `source` ({url, from, to, interval}; seconds) has, and says which panels are empty or fail.
window.draw = async (dashboard, source, width, note) => {
  const theme = createTheme({ colors: { mode: "dark" } });
  const { values, shown } = await variables(dashboard, source);
  const replace = (text, scoped) => filled(text ?? "", { ...values, ...scoped });
  const column = (width - 2 * MARGIN + GAP) / 24;
  const problems = [];
  const panels = [];
  for (const panel of dashboard.panels.flatMap((one) => [one, ...(one.collapsed ? [] : (one.panels ?? []))])) {
    const { x, y, w, h } = panel.gridPos;
    const place = { left: x * column, top: y * (CELL + GAP), width: w * column - GAP, height: h * CELL + (h - 1) * GAP };
    const one = { panel, place };
    panels.push(one);
    if (panel.type === "row") continue;
    const title = `${panel.title || panel.type} (${panel.type}, ${panel.id})`;
    try {
      const traced = (panel.targets ?? []).find((target) => target.datasource?.type === "jaeger");
      const found = await (traced ? jaeger(panel, traced, values, source) : frames(panel, values, source, place.width));
      Object.assign(one, found, { data: await prepared(panel, found.frames ?? [], theme, replace) });
      if (!hasData(one)) problems.push(`${title}: no data`);
      if (!DRAWN[panel.type]) problems.push(`${title}: no such panel here`);
    } catch (error) {
      one.error = String(error);
      problems.push(`${title}: ${error}`);
    }
  }
  const timeRange = { from: dateTime(source.from * 1000), to: dateTime(source.to * 1000), raw: { from: "", to: "" } };
  const height = Math.max(...panels.map(({ place }) => place.top + place.height));
  await new Promise((drawn) =>
    createRoot(document.getElementById("root")).render(
      <ThemeContext.Provider value={theme}>
        <GlobalStyles isExtensionSidebarOpen={false} />
        <div style={{ background: theme.colors.background.canvas, padding: MARGIN, width, color: theme.colors.text.primary }}>
          <Bar {...{ dashboard, shown, source, note, theme }} />
          <div style={{ position: "relative", height }} ref={(element) => element && drawn()}>
            {panels.map((one) => (
              <div key={one.panel.id ?? one.panel.title} style={{ position: "absolute", ...one.place }}>
                {one.panel.type === "row" ? <Row panel={one.panel} theme={theme} /> : <Panel {...{ ...one, theme, timeRange, replace }} />}
              </div>
            ))}
          </div>
        </div>
      </ThemeContext.Provider>,
    ),
  );
  return { problems, height: Math.ceil(document.getElementById("root").getBoundingClientRect().height) };
};

function Bar({ dashboard, shown, source, note, theme }) {
  const time = (at) => new Date(at * 1000).toISOString().slice(11, 19);
  const box = { border: `1px solid ${theme.colors.border.medium}`, borderRadius: 4, padding: "4px 8px", fontSize: 13 };
  const label = { ...box, background: theme.colors.background.secondary, borderRadius: "4px 0 0 4px", borderRight: 0, fontWeight: 500 };
  return (
    <div style={{ marginBottom: ROW_PADDING }}>
      <div style={{ display: "flex", justifyContent: "space-between", marginBottom: 12 }}>
        <span style={{ fontSize: 18, fontWeight: 500 }}>{dashboard.title}</span>
        <span style={{ ...box, color: theme.colors.text.secondary }}>{note}</span>
        <span style={box}>{time(source.from)} to {time(source.to)} UTC</span>
      </div>
      <div style={{ display: "flex", flexWrap: "wrap", gap: 12 }}>
        {shown.map(([name, value]) => (
          <span key={name} style={{ display: "flex" }}>
            <span style={label}>{name}</span>
            <span style={{ ...box, borderRadius: "0 4px 4px 0" }}>{value}</span>
          </span>
        ))}
      </div>
    </div>
  );
}

function Row({ panel, theme }) {
  return (
    <div style={{ display: "flex", alignItems: "center", height: "100%", gap: 6, fontSize: 15, fontWeight: 500, color: theme.colors.text.primary }}>
      <Icon name={panel.collapsed ? "angle-right" : "angle-down"} />
      {panel.title}
    </div>
  );
}

function Panel({ place, error, ...drawn }) {
  const { panel, theme, replace } = drawn;
  const Drawn = DRAWN[panel.type];
  const nothing = error ?? (!Drawn ? `no ${panel.type} here` : hasData(drawn) ? "" : (panel.fieldConfig?.defaults?.noValue ?? "No data"));
  return (
    <PanelChrome title={replace(panel.title)} description={panel.description} width={place.width} height={place.height}
      displayMode={panel.transparent ? "transparent" : "default"}>
      {(width, height) =>
        nothing ? (
          <div style={{ display: "flex", alignItems: "center", justifyContent: "center", width, height, color: theme.colors.text.secondary }}>{nothing}</div>
        ) : (
          <Drawn {...drawn} {...{ width, height }} />
        )
      }
    </PanelChrome>
  );
}
