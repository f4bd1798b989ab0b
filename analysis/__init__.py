"""Offline analysis: what is asked of stored requests after an incident or before a decision.

Each module is one sub-command or what several share. All ask a daemon, a store file, a snapshot or a Parquet
archive alike, through `kvscope.source`.
"""
