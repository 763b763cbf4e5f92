//! The life of the process: start, wait for a signal, stop in order (spec 01 §8.1).
//!
//! Pods keep running when the agent stops.

use std::{process::ExitCode, time::Duration};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::{build, logging, process};
use crate::{
    config::{Loaded, StartupError},
    sys::heap,
};

/// How long tasks may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Worker threads: everything that could block is elsewhere, so two are enough.
const WORKERS: usize = 2;

/// Runs the agent until it is told to stop.
pub fn run(loaded: Loaded) -> ExitCode {
    heap::tune();
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
            let outcome = runtime.block_on(live(&loaded));
            // What blocks in a file system that hangs is left behind, never waited for.
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
        eprintln!("the log could not be written: {cause}");
    }
    code
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(32)
        .thread_keep_alive(Duration::from_secs(5))
        .thread_name("berth")
        .enable_all()
        .build()
}

async fn live(loaded: &Loaded) -> Result<(), String> {
    let mut signals = Signals::new().map_err(|error| format!("cannot listen for signals: {error}"))?;
    may_start(loaded)?;
    process::tune(loaded);
    let _lock = process::lock_file(loaded).await?;
    let stop = CancellationToken::new();
    let tasks = tokio::select! {
        built = build::build(loaded, stop.clone()) => built.map_err(|error| error.to_string())?,
        () = signals.next() => return Ok(()),
    };
    process::notify_ready();
    signals.next().await;
    info!("Stopping; pods keep running");
    stop.cancel();
    tasks.close();
    let ended = tokio::select! {
        ended = timeout(STOP_LIMIT, tasks.wait()) => ended.is_ok(),
        () = signals.next() => return Err("stopped at once by a second signal".to_owned()),
    };
    if !ended {
        warn!(tasks = tasks.len(), "Some tasks did not end in time");
    }
    Ok(())
}

/// What this release cannot do is refused with the setting's name, not half done.
fn may_start(loaded: &Loaded) -> Result<(), String> {
    if !loaded.is_standalone() {
        return Err("cluster mode (--kubeconfig, --bootstrap-kubeconfig) is not built yet; leave both out to run \
                    pods of a directory or URL"
            .to_owned());
    }
    if loaded.config.authentication.webhook.enabled {
        return Err("no client provided, cannot use webhook authentication (standalone: set \
                    authentication.webhook.enabled: false and authorization.mode: AlwaysAllow)"
            .to_owned());
    }
    if loaded.config.authorization.mode == "Webhook" {
        return Err("no client provided, cannot use webhook authorization (standalone: set \
                    authorization.mode: AlwaysAllow)"
            .to_owned());
    }
    Ok(())
}

/// SIGTERM and SIGINT.
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
