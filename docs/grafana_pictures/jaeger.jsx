// What Grafana's Jaeger source asks, and stand-ins for the two panels that are not in its library: node graph and traces.

import React from "react";
import { FieldType, getValueFormat } from "@grafana/data";

import { filled } from "./prometheus.js";

const COLORS = { compute: "green", capacity: "yellow", transfer: "blue", coordination: "red", unknown: "purple" };
const LATEST = 50;
const SPAN_PX = 24;

async function ask(path, parameters) {
  const answer = await (await fetch(`/jaeger/api/${path}?${new URLSearchParams(parameters)}`)).json();
  if (answer.errors?.length) throw new Error(answer.errors[0].msg);
  return answer.data;
}

// What the target of a panel asks for: `{frames, graph, trace}`, of which one is there.
export async function jaeger(panel, target, values, { from, to }) {
  const found = (parameters) => ask("traces", { start: from * 1e6, end: to * 1e6, ...parameters });
  if (target.queryType === "dependencyGraph") return { graph: await ask("dependencies", { endTs: to * 1000, lookback: (to - from) * 1000 }) };
  const service = filled(target.service ?? "$traced", values);
  if (target.queryType === "search") return { frames: [traceList(await found({ service, limit: target.limit ?? LATEST }))] };
  const id = filled(target.query ?? "", values);
  if (id) return { trace: (await ask(`traces/${id}`, {}))[0] };
  // Nobody has chosen one: that which took longest to its first token.
  const traces = (await found({ service, limit: LATEST })).filter((trace) => Object.keys(trace.processes).length > 1);
  return { trace: traces.sort((a, b) => untilFirstToken(b) - untilFirstToken(a))[0] };
}

function untilFirstToken(trace) {
  const first = Math.min(...trace.spans.map((span) => span.startTime));
  const steps = trace.spans.filter((span) => tag(span, "kvscope.step") && span.operationName !== "decode.generate");
  return Math.max(...steps.map((span) => span.startTime + span.duration)) - first;
}

function tag(span, key) {
  return span.tags.find((one) => one.key === key)?.value;
}

function root(trace) {
  return trace.spans.find((span) => !span.references.length) ?? trace.spans[0];
}

function traceList(traces) {
  const column = (name, type, value, config = {}) => ({ name, type, config, values: traces.map(value) });
  return {
    length: traces.length,
    fields: [
      column("traceID", FieldType.string, (trace) => trace.traceID, { displayNameFromDS: "Trace ID", links: [{ title: "Trace", url: "#" }] }),
      column("traceName", FieldType.string, (trace) => `${trace.processes[root(trace).processID].serviceName}: ${root(trace).operationName}`, { displayNameFromDS: "Trace name" }),
      column("startTime", FieldType.time, (trace) => root(trace).startTime / 1000, { displayNameFromDS: "Start time" }),
      column("duration", FieldType.number, (trace) => root(trace).duration, { displayNameFromDS: "Duration", unit: "µs" }),
    ],
  };
}

// Stand-in: a trace as a waterfall, root first, each span below its parent.
export function Traces({ trace, width, height, theme }) {
  const begin = root(trace).startTime;
  const duration = Math.max(...trace.spans.map((span) => span.startTime + span.duration)) - begin;
  const below = (id, depth) =>
    trace.spans
      .filter((span) => (span.references.find((one) => one.refType === "CHILD_OF")?.spanID ?? "") === id)
      .sort((a, b) => a.startTime - b.startTime)
      .flatMap((span) => [{ span, depth }, ...below(span.spanID, depth + 1)]);
  const spans = below("", 0);
  const row = Math.min(SPAN_PX, Math.floor((height - 28) / spans.length));
  const names = 0.3 * width;
  const scale = (width - names - 90) / duration;
  return (
    <div style={{ height, overflow: "hidden", fontSize: 12 }}>
      <div style={{ color: theme.colors.text.secondary, marginBottom: 8 }}>
        {trace.traceID}: {trace.spans.length} spans, {text(duration)}
      </div>
      {spans.map(({ span, depth }) => {
        const color = theme.visualization.getColorByName(COLORS[tag(span, "kvscope.class")] ?? "text");
        const left = (span.startTime - begin) * scale;
        return (
          <div key={span.spanID} style={{ display: "flex", height: row, lineHeight: `${row}px`, whiteSpace: "nowrap" }}>
            <span style={{ width: names, paddingLeft: 16 * depth, overflow: "hidden" }}>
              <b style={{ fontWeight: 500 }}>{trace.processes[span.processID].serviceName}</b>{" "}
              <span style={{ color: theme.colors.text.secondary }}>{span.operationName}</span>
            </span>
            <span style={{ position: "relative", flex: 1 }}>
              <span style={{ position: "absolute", left, top: row / 4, height: row / 2, width: Math.max(span.duration * scale, 2), background: color, opacity: tag(span, "kvscope.path") === "overlapped" ? 0.4 : 1 }} />
              <span style={{ position: "absolute", left: left + Math.max(span.duration * scale, 2) + 6, color: theme.colors.text.secondary }}>{text(span.duration)}</span>
            </span>
          </div>
        );
      })}
    </div>
  );
}

// Stand-in: prefill engines to the left, decode engines to the right, a line for each pair as thick as it has requests.
export function NodeGraph({ graph, width, height, theme }) {
  const sides = [[...new Set(graph.map((edge) => edge.parent))].sort(), [...new Set(graph.map((edge) => edge.child))].sort()];
  const most = Math.max(...graph.map((edge) => edge.callCount));
  const at = (side, name) => ({ x: width * (side ? 0.7 : 0.3), y: (height * (sides[side].indexOf(name) + 0.5)) / sides[side].length });
  const size = Math.min(16, height / (3 * Math.max(...sides.map((side) => side.length))));
  return (
    <svg width={width} height={height} style={{ font: "12px Inter, sans-serif" }}>
      {graph.map((edge) => {
        const [from, to] = [at(0, edge.parent), at(1, edge.child)];
        const along = 0.25;
        return (
          <g key={`${edge.parent} ${edge.child}`}>
            <line x1={from.x} y1={from.y} x2={to.x} y2={to.y} stroke={theme.colors.text.disabled} strokeWidth={1 + (5 * edge.callCount) / most} />
            <text x={from.x + (to.x - from.x) * along} y={from.y + (to.y - from.y) * along - 6} fill={theme.colors.text.primary} textAnchor="middle"
              stroke={theme.colors.background.primary} strokeWidth={4} paintOrder="stroke">{edge.callCount}</text>
          </g>
        );
      })}
      {sides.flatMap((names, side) =>
        names.map((name) => {
          const { x, y } = at(side, name);
          return (
            <g key={`${side} ${name}`}>
              <circle cx={x} cy={y} r={size} fill={theme.colors.background.secondary} stroke={theme.visualization.getColorByName("blue")} strokeWidth={2} />
              <text x={x + (side ? 1 : -1) * (size + 8)} y={y} dominantBaseline="middle" textAnchor={side ? "start" : "end"} fill={theme.colors.text.primary}>{name}</text>
            </g>
          );
        }),
      )}
    </svg>
  );
}

function text(us) {
  const { text, suffix } = getValueFormat("µs")(us, 1);
  return `${text}${suffix}`;
}
