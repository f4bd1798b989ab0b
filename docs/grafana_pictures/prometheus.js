// What Grafana's Prometheus source and its dashboard variables do: queries with variables filled in, as data frames.

import { FieldType } from "@grafana/data";

const ALL = "$__all";
const VARIABLE = /\$(?:\{(\w+)(?::\w+)?\}|(\w+))/g;

async function ask(url, path, parameters) {
  const query = new URLSearchParams(parameters);
  const answer = await (await fetch(`${url}/api/v1/${path}?${query}`)).json();
  if (answer.status !== "success") throw new Error(answer.error);
  return answer.data;
}

// Text with `$name` and `${name}` filled in; a name that is not known stays as it is.
export function filled(text, values) {
  return text.replace(VARIABLE, (all, braced, plain) => values[braced ?? plain] ?? all);
}

// The values that Grafana would fill in, and what its drop-downs would show: `{values, shown}`.
export async function variables(dashboard, { url, from, to }) {
  const values = {};
  const shown = [];
  for (const variable of dashboard.templating?.list ?? []) {
    const label = variable.label || variable.name;
    if (variable.type !== "query") {
      values[variable.name] = variable.type === "datasource" ? `kvscope-${variable.query}` : String(variable.current?.value ?? "");
      if (variable.hide !== 2) shown.push([label, values[variable.name]]);
      continue;
    }
    const [, metric, name] = /^label_values\((.*),\s*(\w+)\)$/.exec(filled(variable.query.query ?? variable.query, values));
    const options = await ask(url, `label/${name}/values`, { "match[]": metric, start: from, end: to });
    const current = [variable.current?.value ?? []].flat();
    const chosen = current.filter((one) => options.includes(one));
    if (current.includes(ALL)) values[variable.name] = variable.allValue || `(${options.join("|")})`;
    else values[variable.name] = chosen[0] ?? options[0] ?? "";
    if (variable.hide !== 2) shown.push([label, current.includes(ALL) ? "All" : values[variable.name] || "None"]);
  }
  return { values, shown };
}

// The data frames of a panel's targets, and those of exemplars: `{frames, exemplars}`.
export async function frames(panel, values, { url, from, to, interval }, width) {
  const step = Math.max(interval, Math.ceil((to - from) / Math.max(width, 100)));
  const known = {
    ...values,
    __interval: `${step}s`,
    __rate_interval: `${Math.max(step + interval, 4 * interval)}s`,
    __range: `${to - from}s`,
    __range_s: `${to - from}`,
  };
  const targets = (panel.targets ?? []).filter((target) => target.expr && !target.hide);
  const tables = targets.filter((target) => target.format === "table").length;
  const found = [];
  const exemplars = [];
  for (const target of targets) {
    const query = filled(target.expr, known);
    if (target.instant) {
      const { resultType, result } = await ask(url, "query", { query, time: to });
      const series = resultType === "scalar" ? [{ metric: {}, value: result }] : result;
      if (target.format === "table") found.push(...table(series, target.refId, tables > 1));
      else found.push(...series.map(({ metric, value }) => frame(target, metric, [value], step)));
    } else {
      const start = Math.ceil(from / step) * step;
      const { result } = await ask(url, "query_range", { query, start, end: to, step });
      found.push(...result.map(({ metric, values }) => frame(target, metric, values, step)));
      if (target.exemplar) exemplars.push(...(await exemplarsOf(url, query, from, to, step)));
    }
  }
  return { frames: found, exemplars };
}

function frame(target, labels, points, step) {
  const name = legend(target.legendFormat, labels);
  return {
    refId: target.refId,
    length: points.length,
    fields: [
      { name: "Time", type: FieldType.time, config: { interval: step * 1000 }, values: points.map(([at]) => at * 1000) },
      { name: "Value", type: FieldType.number, labels, config: { displayNameFromDS: name }, values: points.map(([, value]) => number(value)) },
    ],
  };
}

function legend(format, labels) {
  if (format && format !== "__auto") return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? name);
  const { __name__: name = "", ...others } = labels;
  const pairs = Object.entries(others).map(([key, value]) => `${key}="${value}"`);
  return pairs.length ? `${name}{${pairs.join(", ")}}` : name || "Value";
}

function table(series, refId, several) {
  if (!series.length) return [];
  const names = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const column = (name, type, values) => ({ name, type, config: {}, values });
  return [
    {
      refId,
      length: series.length,
      fields: [
        column("Time", FieldType.time, series.map(({ value }) => value[0] * 1000)),
        ...names.map((name) => column(name, FieldType.string, series.map(({ metric }) => metric[name] ?? ""))),
        column(several ? `Value #${refId}` : "Value", FieldType.number, series.map(({ value }) => number(value[1]))),
      ],
    },
  ];
}

async function exemplarsOf(url, query, start, end, step) {
  const series = await ask(url, "query_exemplars", { query, start, end });
  const all = series.flatMap((one) => one.exemplars).map(({ timestamp, value }) => ({ at: timestamp * 1000, value: number(value) }));
  return thinned(all, step * 1000);
}

// As Grafana does: of each step the highest, and those that are two standard deviations below the one before.
function thinned(exemplars, step) {
  const mean = exemplars.reduce((sum, { value }) => sum + value, 0) / exemplars.length;
  const apart = 2 * Math.sqrt(exemplars.reduce((sum, { value }) => sum + (value - mean) ** 2, 0) / exemplars.length);
  const last = new Map();
  return [...exemplars].sort((a, b) => b.value - a.value).filter(({ at, value }) => {
    const before = last.get(Math.floor(at / step));
    if (before !== undefined && before - value < apart) return false;
    last.set(Math.floor(at / step), value);
    return true;
  });
}

function number(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}
