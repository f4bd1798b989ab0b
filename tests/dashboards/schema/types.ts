// What a dashboard's JSON may hold: Grafana's own types, with enums widened to their values. The package has
// no types of queries and of data links; those at the end are by hand, after Grafana's sources.

import type * as g from '@grafana/schema';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen';
import type * as nodegraph from '@grafana/schema/dist/esm/raw/composable/nodegraph/panelcfg/x/NodeGraphPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';

type W<T> = T extends string
  ? string extends T
    ? string
    : `${T}`
  : T extends (infer U)[]
    ? W<U>[]
    : T extends object
      ? { [K in keyof T]: W<T[K]> }
      : T;

type NoOptions = Record<string, never>;

// Options and `custom` of the field config, by type of panel.
interface Kinds {
  bargauge: [bargauge.Options, NoOptions];
  nodeGraph: [nodegraph.Options, NoOptions];
  stat: [stat.Options, NoOptions];
  table: [table.Options, table.FieldConfig];
  timeseries: [Omit<timeseries.Options, 'timezone'>, timeseries.FieldConfig];
  traces: [NoOptions, NoOptions];
}

type Defaults<C> = Omit<g.FieldConfig, 'custom' | 'links'> & { custom?: Partial<C>; links?: DataLink[] };

type OnePanel<K extends keyof Kinds> = W<
  Omit<g.Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> & {
    type: K;
    title: string;
    options?: Kinds[K][0];
    fieldConfig?: { defaults: Defaults<Kinds[K][1]>; overrides: Override[] };
    targets: (PrometheusQuery | JaegerQuery)[];
  }
>;

type Override = {
  matcher: { id: 'byName' | 'byRegexp'; options: string };
  properties: (
    | { id: 'color'; value: g.FieldColor }
    | { id: 'custom.cellOptions'; value: g.TableCellOptions }
    | { id: 'custom.width'; value: number }
    | { id: 'decimals'; value: number }
    | { id: 'links'; value: DataLink[] }
    | { id: 'thresholds'; value: g.ThresholdsConfig }
    | { id: 'unit'; value: string }
  )[];
};

export type Panel = { [K in keyof Kinds]: OnePanel<K> }[keyof Kinds];
export type Row = W<Omit<g.RowPanel, 'panels'>> & { panels: Panel[] };
export type Variable = W<g.VariableModel>;
export type Dashboard = W<Omit<g.Dashboard, 'panels' | 'templating' | 'annotations'>> & { annotations: {} };

interface DataLink {
  title: string;
  url: string;
  targetBlank?: boolean;
}

interface PrometheusQuery {
  refId: string;
  datasource: { type: 'prometheus'; uid: string };
  expr: string;
  instant: boolean;
  range: boolean;
  legendFormat?: string;
  exemplar?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
}

interface JaegerQuery {
  refId: string;
  datasource: { type: 'jaeger'; uid: string };
  queryType?: 'search' | 'dependencyGraph';
  service?: string;
  limit?: number;
  query?: string;
}
