"""Videos of scored episodes, all replicas of a run in one picture."""

from offrl.video.filming import film, prepare
from offrl.video.picture import NoVideo

__all__ = ["NoVideo", "film", "prepare"]
