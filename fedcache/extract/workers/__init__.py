"""Where batches are computed: in this process, in CPU workers, before a GPU, or as tasks for other machines."""
