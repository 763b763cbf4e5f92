//! Process lifecycle: start, wait for a signal, stop in order (spec 01 §8.1).
//!
//! Pods keep running when the agent stops.

use std::{
    fs::File,
    io::Write,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use nix::fcntl::Flock;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{MissedTickBehavior, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{composition_root, process};
use crate::{
    logging::{self, LogHandle},
    probes::LOOKUPS,
    shutdown::{Drain, DrainCause},
    task_supervisor::TaskSupervisor,
    watchdog::{self, Checks, ServiceManager},
};
use berth_config::{LoadedConfig, StartupError};
use berth_server::ports::Health;
use berth_sys::jemalloc;

/// Timeout for all tasks to end.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Timeout for the export of the last spans.
const LAST_SPANS_LIMIT: Duration = Duration::from_secs(2);
/// Interval at which free heap pages are returned to the kernel.
const HEAP_PURGE_PERIOD: Duration = Duration::from_secs(5);
/// Number of worker threads: blocking work runs elsewhere, so two suffice.
const WORKERS: usize = 2;

/// Maximum number of threads of the blocking pool. Volumes and host name lookups use at most their share of them
/// (`berth_volumes::THREADS`, `probes::LOOKUPS`), however many hang.
const BLOCKING: usize = 64;
const _: () = assert!(BLOCKING >= berth_volumes::THREADS + LOOKUPS + 16, "others have threads of their own");

/// Runs the agent until a signal or until a supervised task is lost; returns the exit code.
pub fn run(loaded: LoadedConfig) -> ExitCode {
    jemalloc::tune();
    let log = match logging::start(&loaded.config.logging) {
        Ok(log) => log,
        Err(cause) => {
            eprintln!("{}", StartupError::Logging(cause.to_string()));
            return ExitCode::FAILURE;
        }
    };
    logging::open(&loaded);
    let outcome = match runtime() {
        Ok(runtime) => {
            let outcome = runtime.block_on(run_until_signal(&loaded, &log));
            // Threads that block on a hung file system are abandoned, not waited for.
            runtime.shutdown_timeout(Duration::from_secs(1));
            outcome
        }
        Err(cause) => Err(cause.to_string()),
    };
    let code = match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            error!(err = %StartupError::Run(cause), "command failed");
            ExitCode::FAILURE
        }
    };
    if let Err(cause) = log.flush() {
        // Standard error may be redirected to the disk that is full.
        let _ = writeln!(std::io::stderr(), "failed to write the log: {cause}");
    }
    code
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(Duration::from_secs(5))
        .thread_name("berth")
        .enable_all()
        .build()
}

/// Process-wide dependencies of the parts.
pub struct ProcessContext {
    /// Cancelled when the agent stops.
    pub stop: CancellationToken,
    /// Supervisor of all tasks.
    pub tasks: TaskSupervisor,
    /// Handle that flushes the log and sets its verbosity.
    pub log: LogHandle,
    /// Drains pods on a termination signal, if configured; set once pods exist.
    pub drain: Arc<OnceLock<Arc<Drain>>>,
}

async fn run_until_signal(loaded: &LoadedConfig, log: &LogHandle) -> Result<(), String> {
    let mut signals = Signals::new().map_err(|error| format!("failed to install signal handlers: {error}"))?;
    let (stop, tasks) = (CancellationToken::new(), TaskSupervisor::default());
    let life = ProcessContext { stop, tasks, log: log.clone(), drain: Arc::default() };
    let (manager, checks) = (service_manager(loaded), Checks::default());
    if let (Some(manager), Some(timeout)) = (&manager, loaded.watchdog) {
        life.tasks.spawn(watchdog::run_watchdog(manager.clone(), timeout, checks.clone(), life.stop.child_token()));
    }
    let period = loaded.config.logging.flush_frequency.duration.std();
    life.tasks.spawn(log.clone().keep_flushing(period, life.stop.child_token()));
    life.tasks.spawn(purge_heap(life.stop.child_token()));
    process::tune(loaded);
    let (health, _lock) = tokio::select! {
        started = start(loaded, &life) => started?,
        () = signals.next() => return Ok(()),
    };
    let _ = checks.set(health); // set only here
    if let Some(manager) = &manager {
        watchdog::notify_with_retry(&**manager, "READY=1").await;
    }
    let lost = tokio::select! {
        () = signals.next() => None,
        lost = life.tasks.wait_for_panic() => Some(lost),
    };
    match life.drain.get().filter(|_| lost.is_none()) {
        Some(drain) => drain_pods(drain, manager.as_deref(), &mut signals).await,
        None => info!("Stopping; pods keep running"),
    }
    life.stop.cancel();
    let tasks = life.tasks.tracker();
    tasks.close();
    let ended = tokio::select! {
        ended = timeout(STOP_LIMIT, tasks.wait()) => ended.is_ok(),
        () = signals.next() => return Err("second signal received, exiting immediately".to_owned()),
    };
    if !ended {
        warn!(tasks = tasks.len(), "Timed out waiting for tasks to stop");
    }
    tokio::select! {
        () = berth_otel::stop_export(LAST_SPANS_LIMIT) => {}
        () = signals.next() => return Err("second signal received, exiting immediately".to_owned()),
    }
    lost.map_or(Ok(()), Err)
}

/// Returns free heap pages to the kernel periodically, also if the agent allocates nothing for hours.
async fn purge_heap(stop: CancellationToken) {
    let mut tick = tokio::time::interval(HEAP_PURGE_PERIOD);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        jemalloc::purge();
    }
}

/// Drains pods before the agent stops, if configured; another signal stops the agent without waiting for them.
async fn drain_pods(drain: &Drain, manager: Option<&ServiceManager>, signals: &mut Signals) {
    info!(limit = ?drain.total(), "Stopping; draining pods first");
    if let Some(manager) = manager {
        let patience = (drain.total() + STOP_LIMIT + LAST_SPANS_LIMIT).as_micros();
        watchdog::notify_with_retry(manager, &format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={patience}")).await;
    }
    tokio::select! {
        () = drain.begin(DrainCause::Terminated) => {}
        () = signals.next() => warn!("Second signal received, stopping without waiting for pods; remaining pods keep running"),
    }
}

/// Builds the parts; returns the health checks, and the lock file for the lifetime of the process.
async fn start(loaded: &LoadedConfig, life: &ProcessContext) -> Result<(Arc<dyn Health>, Option<Flock<File>>), String> {
    let lock = process::lock_file(loaded).await?;
    let health = composition_root::build(loaded, life).await.map_err(|error| error.to_string())?;
    Ok((health, lock))
}

/// The service manager that started the agent and expects notifications; failing to reach it does not prevent the
/// start.
fn service_manager(loaded: &LoadedConfig) -> Option<Arc<ServiceManager>> {
    let manager = ServiceManager::of_environment().unwrap_or_else(|error| {
        error!(err = %error, "Failed to connect to the service manager at NOTIFY_SOCKET");
        None
    });
    if manager.is_none() && loaded.watchdog.is_some() {
        warn!("WATCHDOG_USEC is set but NOTIFY_SOCKET is not reachable: the systemd watchdog will not be notified");
    }
    manager.map(Arc::new)
}

/// SIGTERM and SIGINT handlers.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
