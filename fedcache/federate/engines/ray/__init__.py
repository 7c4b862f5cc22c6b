"""Work on the machines of a Ray cluster (extra ``ray``); neither Ray Data nor Ray Tune is used."""
