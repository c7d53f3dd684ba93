"""The experience store: judged trajectories that outlive their run, as Parquet files with lineage."""
