from small_models import cpu, cuda, few_threads, folder, small  # noqa: F401
