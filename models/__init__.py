"""Models as their authors wrote them, cut by ``stepwell_stage.split`` and compared with one process."""
