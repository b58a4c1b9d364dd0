"""Videos of scored episodes, all replicas of a run in one picture."""

from offrl.video.frames import NoVideo
from offrl.video.record import film, prepare

__all__ = ["NoVideo", "film", "prepare"]
