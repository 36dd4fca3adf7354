from small_models import cpu, cuda, folder, small  # noqa: F401
