//! CRI start-up probes: runtime reachable, API version, and cgroup driver (spec 01 §13).
//!
//! All must succeed before anything else starts (spec 03a §2.1 "Start-up probes").

use std::{path::Path, sync::Arc, time::Duration};

use futures::StreamExt;
use inotify::{Inotify, WatchMask};
use tokio::{
    net::UnixStream,
    time::{Instant, sleep, timeout_at},
};
use tracing::{info, warn};

use super::{CriClients, CriError, CriResult, ImageService, RuntimeService, reply_validation};
use berth_metrics::{Registry, cri_losing_support};
use berth_proto::cri;
use berth_sys::backoff::Backoff;

/// Reason why the agent cannot start with this runtime; operators depend on these texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// The runtime service does not respond.
    #[error(
        "validate service connection: validate CRI v1 runtime API for endpoint \"{endpoint}\": {}",
        service_words(source, "runtime.v1.RuntimeService")
    )]
    Runtime {
        /// Configured endpoint.
        endpoint: String,
        /// Error of the call.
        source: CriError,
    },
    /// The image service does not respond.
    #[error(
        "validate service connection: validate CRI v1 image API for endpoint \"{endpoint}\": {}",
        service_words(source, "runtime.v1.ImageService")
    )]
    Images {
        /// Configured endpoint.
        endpoint: String,
        /// Error of the call.
        source: CriError,
    },
    /// `RuntimeConfig` failed three times in a row.
    #[error("{0}")]
    Config(CriError),
    /// Unknown value of the cgroup driver.
    #[error("runtime returned an unknown cgroup driver {0}")]
    CgroupDriver(i32),
    /// The version call failed, or its reply lacks fields.
    #[error("{0}")]
    Version(CriError),
    /// Unsupported version of the runtime API.
    #[error("runtime api version is not supported")]
    Unsupported,
}

/// Error text; adds the wording of gRPC's Go server where the server rejects an unknown service without a message.
fn service_words(error: &CriError, service: &str) -> String {
    match error {
        CriError::Rpc { code: tonic::Code::Unimplemented, message } if message.is_empty() => {
            format!("rpc error: code = Unimplemented desc = unknown service {service}")
        }
        other => other.to_string(),
    }
}

/// Cgroup driver reported by the runtime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuntimeCgroupDriver {
    /// Not reported: the configured driver applies.
    AsConfigured,
    /// `systemd`.
    Systemd,
    /// `cgroupfs`.
    Cgroupfs,
}

/// Facts about the runtime, collected by the probes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuntimeInfo {
    /// Name of the runtime: the scheme of container IDs.
    pub name: Arc<str>,
    /// Version of the runtime.
    pub version: String,
    /// Cgroup driver to use.
    pub cgroup_driver: RuntimeCgroupDriver,
}

/// Version of the runtime API, as `Version` reports it.
const KUBE_RUNTIME_API_VERSION: &str = "0.1.0";
const CONFIG_TRIES: u32 = 3;
const CONFIG_PAUSE: Duration = Duration::from_secs(2);

/// Runs the start-up probes, after waiting up to `patience` for the sockets and for a runtime that is still starting.
///
/// # Errors
/// The first probe that fails; the process must not start.
pub async fn probe(
    connection: &CriClients,
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
    let version = retry_until_initialized(until, || runtime.version(""));
    version.await.map_err(|source| ProbeError::Runtime { endpoint, source })?;
    let endpoint = connection.image_place.endpoint.clone();
    let images = retry_until_initialized(until, || images.image_fs_info());
    images.await.map_err(|source| ProbeError::Images { endpoint, source })?;
    let cgroup_driver = cgroup_driver(runtime, registry).await?;
    let version = runtime.version(KUBE_RUNTIME_API_VERSION).await.map_err(ProbeError::Version)?;
    reply_validation::version(&version).map_err(ProbeError::Version)?;
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

/// Retries with back-off while the runtime reports that it is not initialized: containerd listens before its CRI
/// service has recovered its state.
async fn retry_until_initialized<T, F: Future<Output = CriResult<T>>>(
    until: Instant,
    ask: impl Fn() -> F,
) -> CriResult<T> {
    let mut backoff = BACKOFF;
    loop {
        let answer = ask().await;
        let starting = matches!(&answer, Err(CriError::Rpc { message, .. }) if message.contains(NOT_YET));
        if !starting || Instant::now() >= until {
            return answer;
        }
        warn!(err = NOT_YET, "Waiting for the container runtime");
        sleep(backoff.next_delay()).await;
    }
}

/// containerd's error text while it starts.
const NOT_YET: &str = "server is not initialized yet";

/// Calls `RuntimeConfig` up to three times, 2 s apart, until a call succeeds.
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

/// Back-off while the runtime starts.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(3)).with_factor(1.6);

/// Waits until the socket accepts connections or `until` has passed; the probes then report the error.
async fn await_socket(socket: &Path, until: Instant) {
    let mut backoff = BACKOFF;
    let mut has_warned = false;
    loop {
        // Watches before the attempt, so that a socket created in between is noticed.
        let watch = socket.parent().and_then(watch);
        if UnixStream::connect(socket).await.is_ok() || Instant::now() >= until {
            return;
        }
        if !has_warned {
            warn!(path = %socket.display(), "Waiting for the container runtime's socket");
            has_warned = true;
        }
        let wake = until.min(Instant::now() + backoff.next_delay());
        if let Some(watch) = watch {
            let mut events = watch;
            // A timeout ends the back-off; an event triggers an immediate retry.
            let _ = timeout_at(wake, events.next()).await;
        } else {
            tokio::time::sleep_until(wake).await;
        }
    }
}

/// Watches the directory with inotify; `None` while it does not exist.
fn watch(directory: &Path) -> Option<inotify::EventStream<[u8; 1024]>> {
    let inotify = Inotify::init().ok()?;
    inotify.watches().add(directory, WatchMask::CREATE | WatchMask::MOVED_TO).ok()?;
    inotify.into_event_stream([0; 1024]).ok()
}
