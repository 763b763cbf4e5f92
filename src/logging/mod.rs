//! The log: klog's text and JSON lines out of `tracing` events. Spec 01 §6, 08 §14.
//!
//! ```text
//!  error!  warn!  info!(v = 2)  debug!  trace!
//!     E      W        I v2       I v4    I v6      one line each, after a look at the verbosity
//! ```
//!
//! Error and warning are always written. Fields of the enclosing spans come first, those of the event
//! after; `err` stands before all. A span whose fields shall always be there is an `info_span!`. Other crates' chatter needs four levels more than ours. The
//! verbosity can be changed while we run, through [`LogHandle`].

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

pub use notices::tell;
pub use streams::Streams;

use berth_config::{
    Loaded, configz,
    fields::{LoggingConfiguration, OutputRoutingOptions},
    text::quote,
};
use layer::{Format, Klog};
use verbosity::Verbosity;

/// Longest time between two flushes: the watchdog takes a log that was not written out for two minutes for one that hangs,
/// whatever was configured.
const LONGEST: Duration = Duration::from_secs(60);

/// What can be done to the log while it is written.
#[derive(Clone)]
pub struct LogHandle {
    verbosity: Arc<Verbosity>,
    streams: Arc<Streams>,
}

impl LogHandle {
    /// The level up to which records are written.
    pub fn verbosity(&self) -> u32 {
        self.verbosity.level()
    }

    /// Changes that level, for everything written from now on.
    pub fn set_verbosity(&self, level: u32) {
        self.verbosity.set_level(level);
        tracing::callsite::rebuild_interest_cache();
    }

    /// Writes out what is buffered.
    ///
    /// # Errors
    /// The stream cannot be written.
    pub fn flush(&self) -> io::Result<()> {
        self.streams.flush()
    }

    /// How long ago the log was last written out without an error; the watchdog asks.
    pub fn since_flush(&self) -> Duration {
        self.streams.since_flush()
    }

    /// Writes out what is buffered every `period`, at least every minute, until `stop`, and once more then.
    pub async fn keep_flushing(self, period: Duration, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(period.clamp(Duration::from_millis(1), LONGEST));
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            // A log that cannot be written has nowhere to say so; `since_flush` shows it.
            let _ = self.flush();
        }
        let _ = self.flush();
    }
}

/// A subscriber that writes to `streams` as `config` says, and its handle.
pub fn subscriber(config: &LoggingConfiguration, streams: Streams) -> (impl Subscriber + Send + Sync, LogHandle) {
    let format = if config.format == "json" { Format::Json } else { Format::Text };
    let handle = LogHandle {
        verbosity: Arc::new(Verbosity::new(config.verbosity, &config.vmodule)),
        streams: Arc::new(streams),
    };
    let layer = Klog::new(format, Arc::clone(&handle.verbosity), Arc::clone(&handle.streams));
    (Registry::default().with(layer), handle)
}

/// Starts the log of this process.
///
/// # Errors
/// There is one already.
pub fn start(config: &LoggingConfiguration) -> Result<LogHandle, tracing::subscriber::SetGlobalDefaultError> {
    let OutputRoutingOptions { split_stream, info_buffer_size } =
        if config.format == "json" { &config.options.json } else { &config.options.text };
    let buffer = usize::try_from(info_buffer_size.amount().value()).unwrap_or(0);
    let streams = if *split_stream { Streams::split(buffer) } else { Streams::standard_error() };
    let (subscriber, handle) = subscriber(config, streams);
    tracing::subscriber::set_global_default(subscriber)?;
    Ok(handle)
}

/// Writes what every log begins with: the version, what loading noticed, and at higher verbosity the
/// flags (1) and the effective configuration (5, secrets masked).
pub fn open(loaded: &Loaded) {
    info!(kubeletVersion = %loaded.version, "Kubelet version");
    for (name, value) in &loaded.flag_values {
        info!(v = 1, "FLAG: --{name}={}", quote(&configz::masked_flag(name, value)));
    }
    loaded.notices.iter().for_each(tell);
    info!(v = 5, configuration = %configz::masked(&loaded.config), "KubeletConfiguration");
    let uid = nix::unistd::geteuid();
    if !uid.is_root() {
        error!("kubelet needs to run as uid `0`. It is being run as {uid}");
    }
}

#[cfg(test)]
mod tests;
