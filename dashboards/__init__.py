"""Grafana dashboards and Prometheus rules as code, and the commands that bring them to Grafana."""
