"""The public names, for type checkers and for the package, which reads them here: one to a line."""

from shared_rpc import errors as errors
from shared_rpc.client.exported import ExportedRecord as ExportedRecord
from shared_rpc.context import cancelled as cancelled
from shared_rpc.context import progress as progress
from shared_rpc.context import raise_if_cancelled as raise_if_cancelled
from shared_rpc.extras.materialize import materialize as materialize
from shared_rpc.memory.pool import PoolOptions as PoolOptions
from shared_rpc.operations.async_client import AsyncClient as AsyncClient
from shared_rpc.operations.channels import AsyncTensorChannel as AsyncTensorChannel
from shared_rpc.operations.channels import AsyncTensorMessage as AsyncTensorMessage
from shared_rpc.operations.channels import TensorChannel as TensorChannel
from shared_rpc.operations.channels import TensorMessage as TensorMessage
from shared_rpc.operations.client import Client as Client
from shared_rpc.operations.handles import AsyncHandle as AsyncHandle
from shared_rpc.operations.handles import Handle as Handle
from shared_rpc.operations.sources import AsyncSource as AsyncSource
from shared_rpc.operations.sources import Source as Source
from shared_rpc.protocol.exported import RecordHeader as RecordHeader
from shared_rpc.protocol.generations import Generation as Generation
from shared_rpc.protocol.infos import ClusterStatus as ClusterStatus
from shared_rpc.protocol.infos import DeviceInfo as DeviceInfo
from shared_rpc.protocol.infos import EndpointStatistics as EndpointStatistics
from shared_rpc.protocol.infos import HolderInfo as HolderInfo
from shared_rpc.protocol.infos import ListedObjectInfo as ListedObjectInfo
from shared_rpc.protocol.infos import MoveInfo as MoveInfo
from shared_rpc.protocol.infos import ObjectInfo as ObjectInfo
from shared_rpc.protocol.infos import ReloadInfo as ReloadInfo
from shared_rpc.protocol.infos import RunInfo as RunInfo
from shared_rpc.protocol.infos import RuntimeInfo as RuntimeInfo
from shared_rpc.protocol.infos import ServerInfo as ServerInfo
from shared_rpc.protocol.infos import SessionInfo as SessionInfo
from shared_rpc.protocol.infos import SourceInfo as SourceInfo
from shared_rpc.protocol.infos import StopInfo as StopInfo
from shared_rpc.protocol.sources import Miss as Miss
from shared_rpc.protocol.specs import EndpointSpec as EndpointSpec
from shared_rpc.protocol.tasks import Progress as Progress
from shared_rpc.protocol.tasks import TaskInfo as TaskInfo
from shared_rpc.protocol.tasks import TaskStatus as TaskStatus
from shared_rpc.protocol.ticket import Ticket as Ticket
from shared_rpc.provider.provider import Provider as Provider
from shared_rpc.provider.provider import SharedFunction as SharedFunction
from shared_rpc.server.server import Server as Server

__version__: str
