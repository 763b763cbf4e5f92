//! What must hold before anything else starts: the runtime answers, speaks our version, and
//! says which cgroup driver it uses (spec 03a §2.1 "Start-up probes", 01 §13).

use std::{path::Path, sync::Arc, time::Duration};

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use tokio::{
    net::UnixStream,
    time::{Instant, sleep, timeout_at},
};
use tracing::{info, warn};

use super::{Connection, CriError, CriResult, ImageService, RuntimeService, validate};
use berth_metrics::{Registry, cri_losing_support};
use berth_proto::cri;

/// Why the agent cannot start on this runtime; the texts are part of the contract with operators.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The runtime service does not answer.
    #[error(
        "validate service connection: validate CRI v1 runtime API for endpoint \"{endpoint}\": {}",
        service_words(source, "runtime.v1.RuntimeService")
    )]
    Runtime {
        /// As configured.
        endpoint: String,
        /// Its answer.
        source: CriError,
    },
    /// The image service does not answer.
    #[error(
        "validate service connection: validate CRI v1 image API for endpoint \"{endpoint}\": {}",
        service_words(source, "runtime.v1.ImageService")
    )]
    Images {
        /// As configured.
        endpoint: String,
        /// Its answer.
        source: CriError,
    },
    /// The runtime did not tell its configuration three times running.
    #[error("{0}")]
    Config(CriError),
    /// It told of a driver that this release does not know.
    #[error("runtime returned an unknown cgroup driver {0}")]
    CgroupDriver(i32),
    /// The version call failed, or lacked fields.
    #[error("{0}")]
    Version(CriError),
    /// Another version of the contract.
    #[error("runtime api version is not supported")]
    Unsupported,
}

/// gRPC servers answer a service they do not have with words of their own, or with none.
fn service_words(error: &CriError, service: &str) -> String {
    match error {
        CriError::Rpc { code: tonic::Code::Unimplemented, message } if message.is_empty() => {
            format!("rpc error: code = Unimplemented desc = unknown service {service}")
        }
        other => other.to_string(),
    }
}

/// What the runtime says about cgroups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuntimeCgroupDriver {
    /// Nothing: the configured driver stays.
    AsConfigured,
    /// `systemd`.
    Systemd,
    /// `cgroupfs`.
    Cgroupfs,
}

/// What the probes learnt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuntimeInfo {
    /// The runtime's name: the scheme of container ids.
    pub name: Arc<str>,
    /// The runtime's own version.
    pub version: String,
    /// Which cgroup driver to use.
    pub cgroup_driver: RuntimeCgroupDriver,
}

/// The version of the contract, as `Version` names it.
const KUBE_RUNTIME_API_VERSION: &str = "0.1.0";
const CONFIG_TRIES: u32 = 3;
const CONFIG_PAUSE: Duration = Duration::from_secs(2);

/// Runs the start-up probes, after waiting up to `patience` for the sockets to be there and for a
/// runtime that has just been started.
///
/// # Errors
/// The first probe that fails; the process must not start.
pub async fn probe(
    connection: &Connection,
    registry: &Registry,
    patience: Duration,
) -> Result<RuntimeInfo, ProbeError> {
    let until = Instant::now() + patience;
    for place in [&connection.runtime_place, &connection.image_place] {
        if let Some(socket) = place.socket() {
            await_socket(socket, until).await;
        }
    }
    let (runtime, images) = (&*connection.runtime, &*connection.images);
    let endpoint = connection.runtime_place.endpoint.clone();
    let version = once_initialized(until, || runtime.version(""));
    version.await.map_err(|source| ProbeError::Runtime { endpoint, source })?;
    let endpoint = connection.image_place.endpoint.clone();
    let images = once_initialized(until, || images.image_fs_info());
    images.await.map_err(|source| ProbeError::Images { endpoint, source })?;
    let cgroup_driver = cgroup_driver(runtime, registry).await?;
    let version = runtime.version(KUBE_RUNTIME_API_VERSION).await.map_err(ProbeError::Version)?;
    validate::version(&version).map_err(ProbeError::Version)?;
    if version.version != KUBE_RUNTIME_API_VERSION {
        return Err(ProbeError::Unsupported);
    }
    info!(
        containerRuntime = %version.runtime_name,
        version = %version.runtime_version,
        apiVersion = %version.runtime_api_version,
        "Container runtime initialized"
    );
    Ok(RuntimeInfo { name: version.runtime_name.into(), version: version.runtime_version, cgroup_driver })
}

/// Asks again while the runtime says that it is not there yet: containerd listens before its CRI
/// service has looked at what runs.
async fn once_initialized<T, F: Future<Output = CriResult<T>>>(until: Instant, ask: impl Fn() -> F) -> CriResult<T> {
    let mut pause = FIRST_PAUSE;
    loop {
        let answer = ask().await;
        let starting = matches!(&answer, Err(CriError::Rpc { message, .. }) if message.contains(NOT_YET));
        if !starting || Instant::now() >= until {
            return answer;
        }
        warn!(words = NOT_YET, "Waiting for the container runtime");
        sleep(pause).await;
        pause = pause.mul_f64(1.6).min(LAST_PAUSE);
    }
}

/// containerd's words while it starts.
const NOT_YET: &str = "server is not initialized yet";

/// Asks up to three times, 2 s apart; stops at the first answer.
async fn cgroup_driver(runtime: &dyn RuntimeService, registry: &Registry) -> Result<RuntimeCgroupDriver, ProbeError> {
    let mut tries = 1;
    let reply = loop {
        match runtime.runtime_config().await {
            Ok(reply) => break reply,
            Err(error) if error.is_unimplemented() => {
                cri_losing_support(registry, "1.37.0");
                warn!(
                    "CRI implementation should be updated to support RuntimeConfig. \
                     Falling back to using cgroupDriver from kubelet config."
                );
                return Ok(RuntimeCgroupDriver::AsConfigured);
            }
            Err(error) if tries == CONFIG_TRIES => return Err(ProbeError::Config(error)),
            Err(error) => warn!(err = %error, attempt = tries, "Failed to get runtime configuration, retrying"),
        }
        tries += 1;
        sleep(CONFIG_PAUSE).await;
    };
    let Some(linux) = reply.linux else { return Ok(RuntimeCgroupDriver::AsConfigured) };
    let driver = match cri::CgroupDriver::try_from(linux.cgroup_driver) {
        Ok(cri::CgroupDriver::Systemd) => RuntimeCgroupDriver::Systemd,
        Ok(cri::CgroupDriver::Cgroupfs) => RuntimeCgroupDriver::Cgroupfs,
        Err(_) => return Err(ProbeError::CgroupDriver(linux.cgroup_driver)),
    };
    info!(cgroupDriver = ?driver, "Using cgroup driver setting received from the CRI runtime");
    Ok(driver)
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(3);

/// Waits until something listens, or the time is up; the probes then tell what is wrong.
async fn await_socket(socket: &Path, until: Instant) {
    let mut pause = FIRST_PAUSE;
    let mut told = false;
    loop {
        // before the attempt, so that a socket made in between is noticed
        let watch = socket.parent().and_then(watch);
        if UnixStream::connect(socket).await.is_ok() || Instant::now() >= until {
            return;
        }
        if !told {
            warn!(path = %socket.display(), "Waiting for the container runtime's socket");
            told = true;
        }
        let wake = until.min(Instant::now() + pause);
        if let Some(watch) = watch {
            let mut events = watch;
            // a timeout is the back-off's turn; an event is reason enough to look again
            let _ = timeout_at(wake, events.next()).await;
        } else {
            tokio::time::sleep_until(wake).await;
        }
        pause = pause.mul_f64(1.6).min(LAST_PAUSE);
    }
}

/// Follows the directory; `None` while it does not exist.
fn watch(directory: &Path) -> Option<inotify::EventStream<[u8; 1024]>> {
    let inotify = Inotify::init().ok()?;
    inotify.watches().add(directory, WatchMask::CREATE | WatchMask::MOVED_TO).ok()?;
    inotify.into_event_stream([0; 1024]).ok()
}
