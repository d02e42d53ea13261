from .plugins.factories import call_factory as call_factory  # moved: import it from .plugins
