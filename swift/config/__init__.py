"""Floor 1: typed settings, files, validation, older names. Imports no torch.

`build_config(SftConfig, {...})` makes a checked configuration from a flat or nested mapping; the command line uses
`parse_command_line`.
"""

from __future__ import annotations

from swift.config.build import build_config, with_saved_config
from swift.config.catalog import COMMANDS, LATER, Command
from swift.config.commands import (
    AppConfig,
    DeployConfig,
    ExportConfig,
    InferConfig,
    MergeLoraConfig,
    PtConfig,
    RlhfConfig,
    SampleConfig,
    SftConfig,
)
from swift.config.files import CONFIG_NAME, dump_yaml, to_flat, to_nested
from swift.config.parse import HelpRequested, Parsed, parse_command_line
from swift.config.saved import load_config, save_config

__all__ = [
    "COMMANDS",
    "CONFIG_NAME",
    "LATER",
    "AppConfig",
    "Command",
    "DeployConfig",
    "ExportConfig",
    "HelpRequested",
    "InferConfig",
    "MergeLoraConfig",
    "Parsed",
    "PtConfig",
    "RlhfConfig",
    "SampleConfig",
    "SftConfig",
    "build_config",
    "dump_yaml",
    "load_config",
    "parse_command_line",
    "save_config",
    "to_flat",
    "to_nested",
    "with_saved_config",
]
