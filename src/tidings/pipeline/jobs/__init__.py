"""The jobs of the pipeline, each a pure function of tables."""
