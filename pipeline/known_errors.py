"""Errors whose message is meant for the user: one line that names the thing and the cure."""

from __future__ import annotations

from inference.cache import RollbackUnsupportedError
from inference.drafters.causal_lm import VocabularyMismatchError
from inference.engine import PromptTooLongError
from inference.model_files import ModelFilesError
from learner.lifecycle import TransitionError
from learner.training import FencedError
from pipeline.archiver import ArchiverError
from pipeline.batch import UnsentEventsError
from pipeline.bench.soak import SoakError
from pipeline.bench.vllm.result import VllmBenchError
from pipeline.demo import DemoError
from pipeline.demo_check import OutputsDifferError
from pipeline.drafter_versions import DrafterVersionError
from pipeline.eventlog.ports import EventLogError
from pipeline.export_formats import ExportFormatError
from pipeline.health import NotHealthyError
from pipeline.json_files import OutputError
from pipeline.local_broker import BenchError, NoBrokerError
from pipeline.locks import LockError
from pipeline.prompts import PromptsError
from pipeline.recording_log import RecordingExistsError
from pipeline.schedule import ScheduleError
from pipeline.storage import ArtifactError
from replay.errors import ReplayError
from schemas.errors import ContractError

KNOWN_ERRORS = (
    ArchiverError,
    ArtifactError,
    BenchError,
    ContractError,
    DemoError,
    DrafterVersionError,
    EventLogError,
    ExportFormatError,
    FencedError,
    LockError,
    ModelFilesError,
    NoBrokerError,
    NotHealthyError,
    OutputError,
    OutputsDifferError,
    PromptTooLongError,
    PromptsError,
    RecordingExistsError,
    ReplayError,
    RollbackUnsupportedError,
    ScheduleError,
    SoakError,
    TransitionError,
    UnsentEventsError,
    VllmBenchError,
    VocabularyMismatchError,
)
