"""What a model's text says: thoughts, content and tool calls, piece by piece. Pure: text in, events out."""

from paceline.parsing.blocks import Block, Blocks, Message, Step
from paceline.parsing.events import ArgumentsText, CallBegin, ContentText, Event, ThoughtText, joined
from paceline.parsing.grammar import calls_of
from paceline.parsing.reply import ReplyParser
from paceline.parsing.tools import CallFormat, Tools, check_tools, format_of, opening_of

__all__ = [
    "ArgumentsText",
    "Block",
    "Blocks",
    "CallBegin",
    "CallFormat",
    "ContentText",
    "Event",
    "Message",
    "ReplyParser",
    "Step",
    "ThoughtText",
    "Tools",
    "calls_of",
    "check_tools",
    "format_of",
    "joined",
    "opening_of",
]
