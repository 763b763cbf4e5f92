//! Agent log: formats `tracing` events as klog text or JSON lines.
//!
//! Implements spec 01 §6, 08 §14.
//!
//! ```text
//!  error!  warn!  info!(v = 2)  debug!  trace!
//!     E      W        I v2       I v4    I v6      one line each, filtered by verbosity
//! ```
//!
//! Errors and warnings are always written. Fields of the enclosing spans come first, those of the event after; `err`
//! precedes all. A span whose fields must always be present is an `info_span!`. Records of other crates need a
//! verbosity four levels higher than the agent's own. [`LogHandle`] changes the verbosity at run time.

mod json;
mod layer;
mod notices;
mod record;
mod streams;
mod text;
mod verbosity;

use std::{io, sync::Arc, time::Duration};

use tokio_util::sync::CancellationToken;
use tracing::{Subscriber, error, info};
use tracing_subscriber::{Registry, layer::SubscriberExt};

pub use notices::log_notice;
pub use streams::OutputStreams;

use berth_config::{
    LoadedConfig, configz,
    fields::{LoggingConfiguration, OutputRoutingOptions},
    text::quote,
};
use layer::{Klog, LogFormat};
use verbosity::Verbosity;

/// Maximum flush period: the watchdog treats a log that was not flushed for two minutes as hanging, whatever period is
/// configured.
const LONGEST: Duration = Duration::from_secs(60);

/// Controls the running log. Cheap to clone.
#[derive(Clone)]
pub struct LogHandle {
    verbosity: Arc<Verbosity>,
    streams: Arc<OutputStreams>,
}

impl LogHandle {
    /// Verbosity: the level up to which records are written.
    pub fn verbosity(&self) -> u32 {
        self.verbosity.level()
    }

    /// Sets the verbosity for all later records.
    pub fn set_verbosity(&self, level: u32) {
        self.verbosity.set_level(level);
        tracing::callsite::rebuild_interest_cache();
    }

    /// Flushes buffered records.
    ///
    /// # Errors
    /// The stream cannot be written.
    pub fn flush(&self) -> io::Result<()> {
        self.streams.flush()
    }

    /// Time since the last successful flush; the watchdog checks it.
    pub fn since_flush(&self) -> Duration {
        self.streams.since_flush()
    }

    /// Flushes every `period`, at most every millisecond and at least every minute, until `stop`, and once more then.
    pub async fn keep_flushing(self, period: Duration, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(period.clamp(Duration::from_millis(1), LONGEST));
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            // A failed flush cannot be logged; `since_flush` reports it.
            let _ = self.flush();
        }
        let _ = self.flush();
    }
}

/// Creates a subscriber that writes to `streams` as configured, and its handle.
pub fn subscriber(config: &LoggingConfiguration, streams: OutputStreams) -> (impl Subscriber + Send + Sync, LogHandle) {
    let format = if config.format == "json" { LogFormat::Json } else { LogFormat::Text };
    let handle = LogHandle {
        verbosity: Arc::new(Verbosity::new(config.verbosity, &config.vmodule)),
        streams: Arc::new(streams),
    };
    let layer = Klog::new(format, Arc::clone(&handle.verbosity), Arc::clone(&handle.streams));
    (Registry::default().with(layer), handle)
}

/// Installs the global subscriber of this process.
///
/// # Errors
/// A global subscriber is already installed.
pub fn start(config: &LoggingConfiguration) -> Result<LogHandle, tracing::subscriber::SetGlobalDefaultError> {
    let OutputRoutingOptions { split_stream, info_buffer_size } =
        if config.format == "json" { &config.options.json } else { &config.options.text };
    let buffer = usize::try_from(info_buffer_size.amount().value()).unwrap_or(0);
    let streams = if *split_stream { OutputStreams::split(buffer) } else { OutputStreams::standard_error() };
    let (subscriber, handle) = subscriber(config, streams);
    tracing::subscriber::set_global_default(subscriber)?;
    Ok(handle)
}

/// Writes the first records of every log: the version, notices from loading the configuration, and at higher verbosity
/// the flags (1) and the effective configuration (5, secrets masked).
pub fn open(loaded: &LoadedConfig) {
    info!(kubeletVersion = %loaded.version, "Kubelet version");
    for (name, value) in &loaded.flag_values {
        info!(v = 1, "FLAG: --{name}={}", quote(&configz::masked_flag(name, value)));
    }
    loaded.notices.iter().for_each(log_notice);
    info!(v = 5, configuration = %configz::masked(&loaded.config), "KubeletConfiguration");
    let uid = nix::unistd::geteuid();
    if !uid.is_root() {
        error!("kubelet needs to run as uid `0`. It is being run as {uid}");
    }
}

#[cfg(test)]
mod tests;
