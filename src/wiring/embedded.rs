//! Embedded container runtime: in this process for the agent, or alone as `berth cri`.

use std::{path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use tokio::{
    signal::unix::{SignalKind, signal},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info, warn};

use super::{
    composition_root::{Base, BuildError, wrong},
    settings,
};
use crate::{logging, serving::embedded_streams::RuntimeTargets};
use berth_config::{EMBEDDED_RUNTIME, LoadedConfig, fields::LoggingConfiguration};
use berth_cri::CriClients;
use berth_runtime::{
    cri as services,
    runtime::Runtime,
    settings as runtime_settings,
    wiring::{self, RuntimeEnvironment},
};
use berth_server::{ports::stream_targets::StreamTargets, streaming::server::listener::BoundListener};

/// Default socket of `berth cri`.
const SOCKET: &str = "unix:///run/berth/cri.sock";
/// Timeout for the runtime's tasks at the end; pods continue to run.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A started runtime.
pub(super) struct EmbeddedRuntime {
    /// Clients of its CRI services.
    pub(super) connection: CriClients,
    /// Its streaming targets.
    pub(super) targets: Arc<dyn StreamTargets>,
    /// Recovery of the state of an earlier process.
    pub(super) recovery: wiring::Recovery,
}

/// Starts the runtime; returns the clients of its services, and its streaming targets.
///
/// # Errors
/// Why the runtime cannot start.
pub(super) async fn open(loaded: &LoadedConfig, base: &Base) -> Result<EmbeddedRuntime, BuildError> {
    check_image_endpoint(&loaded.config.image_service_endpoint)?;
    let config = runtime_settings::read().map_err(BuildError)?;
    let (socket, streams) = (config.serve_socket.clone(), config.stream_address.clone());
    let around = RuntimeEnvironment {
        hostname: host_name()?,
        has_builtin_images: true,
        unpacker: Some(wiring::OWN_PROGRAM.into()),
        tasks: base.tasks.tracker().clone(),
        stop: base.stop.child_token(),
    };
    let (runtime, _) = wiring::open_counted(config, around, &base.registry).await.map_err(wrong)?;
    let recovery = wiring::start(&runtime);
    if !socket.is_empty() {
        let (serving, path, stop) = (runtime.clone(), socket_path(&socket)?, base.stop.child_token());
        let listening = listen(&streams).await?;
        base.tasks.spawn(async move {
            if let Err(cause) = over_socket(&serving, path, listening, stop).await {
                error!(err = %cause, "Failed to serve the socket of the embedded runtime");
            }
        });
    }
    let memory = services::over_memory(&runtime, base.stop.child_token());
    let dial: berth_cri::Dial = Arc::new(move || {
        let memory = memory.clone();
        Box::pin(async move { memory.connect().await })
    });
    info!(root = %runtime.shell.layout.root.display(), "Using the embedded runtime");
    let connection = berth_cri::connect_over(dial, &settings::cri(loaded), &base.registry);
    Ok(EmbeddedRuntime { connection, targets: Arc::new(RuntimeTargets(runtime)), recovery })
}

/// Rejects a separate image service: the embedded runtime would not find its images.
fn check_image_endpoint(endpoint: &str) -> Result<(), BuildError> {
    if endpoint.is_empty() || endpoint == EMBEDDED_RUNTIME {
        return Ok(());
    }
    Err(BuildError(format!(
        "imageServiceEndpoint: {endpoint:?} cannot be used with the embedded runtime, which has its own image store: \
         unset it, or set containerRuntimeEndpoint too"
    )))
}

async fn listen(address: &str) -> Result<BoundListener, BuildError> {
    let to_error = |cause: std::io::Error| BuildError(format!("embeddedRuntime.streamAddress: {cause}"));
    BoundListener::bind(address).await.map_err(to_error)
}

/// Serves the CRI socket, and its streaming server for the same time.
async fn over_socket(
    runtime: &Arc<Runtime>,
    path: PathBuf,
    streams: BoundListener,
    stop: CancellationToken,
) -> Result<(), BuildError> {
    let (url, ours) = (streams.url(), stop.child_token());
    let meeting = streams.serve(Arc::new(RuntimeTargets(runtime.clone())), ours.clone());
    let serving = async {
        let served = services::over_socket(runtime, path, &url, stop).await;
        ours.cancel();
        served
    };
    tokio::join!(serving, meeting).0.map_err(wrong)
}

fn socket_path(endpoint: &str) -> Result<PathBuf, BuildError> {
    berth_cri::socket_path(endpoint).map_err(wrong)
}

/// `berth cri`: serves the runtime alone on a socket until a signal. Pods continue to run.
pub fn serve(socket: Option<String>) -> ExitCode {
    if let Err(cause) = logging::start(&LoggingConfiguration::default()) {
        eprintln!("berth cri: {cause}");
        return ExitCode::FAILURE;
    }
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(wrong)
        .and_then(|runtime| runtime.block_on(serve_standalone(socket)));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("berth cri: {cause}");
            ExitCode::FAILURE
        }
    }
}

/// Host name of the machine, regardless of the node's name: host-network pods use it.
fn host_name() -> Result<String, BuildError> {
    Ok(nix::unistd::gethostname().map_err(wrong)?.to_string_lossy().into_owned())
}

async fn serve_standalone(socket: Option<String>) -> Result<(), BuildError> {
    let config = runtime_settings::read().map_err(BuildError)?;
    let configured = Some(config.serve_socket.clone()).filter(|socket| !socket.is_empty());
    let path = socket_path(&socket.or(configured).unwrap_or_else(|| SOCKET.to_owned()))?;
    let streams = listen(&config.stream_address).await?;
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let hostname = host_name()?;
    let unpacker = Some(wiring::OWN_PROGRAM.into());
    let around =
        RuntimeEnvironment { hostname, has_builtin_images: true, unpacker, tasks: tasks.clone(), stop: stop.clone() };
    let (runtime, _) = wiring::open(config, around).await.map_err(wrong)?;
    let recovery = wiring::start(&runtime);
    let mut terminate = signal(SignalKind::terminate()).map_err(wrong)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(wrong)?;
    println!("Serving CRI on {}", path.display());
    let served = over_socket(&runtime, path, streams, stop.clone());
    tokio::select! {
        served = served => served?,
        cause = recovery.failed() => return Err(wrong(cause)),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.cancel();
    tasks.close();
    if timeout(LAST_WORDS, tasks.wait()).await.is_err() {
        warn!(limit = ?LAST_WORDS, "Timed out waiting for tasks of the embedded runtime");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_the_runtimes_own() {
        for (endpoint, is_fine) in [("", true), ("embedded", true), ("unix:///run/containerd/containerd.sock", false)] {
            let checked = check_image_endpoint(endpoint);
            assert_eq!(checked.is_ok(), is_fine, "{endpoint}");
            let names_both =
                |error: BuildError| error.0.contains(endpoint) && error.0.contains("containerRuntimeEndpoint");
            assert!(checked.err().is_none_or(names_both), "{endpoint}");
        }
    }
}
