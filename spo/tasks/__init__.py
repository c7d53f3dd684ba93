"""Problems: readers of published and own task files, splits, decontamination, and the toy contest."""
