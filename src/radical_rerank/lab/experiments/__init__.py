"""For people: pages, overlays, tables, plots."""
