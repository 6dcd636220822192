# Plots in notebooks: characters that DejaVu lacks, such as Chinese ones, from a second font instead of boxes.
get_config().InlineBackend.rc = {  # type: ignore[name-defined]  # noqa: F821  IPython defines it
    "font.family": ["sans-serif", "WenQuanYi Micro Hei"]
}
