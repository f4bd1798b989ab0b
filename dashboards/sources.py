"""Where panels get their data: whatever the dashboard's variables choose, never a fixed data source."""

from __future__ import annotations

from grafana_foundation_sdk.models import common as c

PROMETHEUS = c.DataSourceRef(type_val="prometheus", uid="${datasource}")
JAEGER = c.DataSourceRef(type_val="jaeger", uid="${jaeger}")
