"""The files of a home as Arrow batches; no module here needs Spark."""
