from run_fixtures import (  # noqa: F401
    asked,
    given_in_child,
    given_ok,
    given_oom,
    given_open_run,
    given_point,
    knobs,
    make_config,
)
