//! What the endpoints for people with a problem do to this process: the log's level, profiles.

use std::{
    io::Write,
    os::unix::ffi::OsStringExt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use jiff::Timestamp;
use prost::Message;
use tracing::info;

use super::{
    logging::LogHandle,
    profile::{self, Named, Taken},
    server_node_logs::MachineLogs,
};
use crate::{
    config::{Loaded, configz},
    metrics::SliMetrics,
    server::{
        Tools,
        ports::{Checkpoints, PodDirectory, ProfileError, Profiles, Verbosity},
        routes::statusz::Statusz,
    },
    sys::sampler::{PER_SECOND, Refused, Sampling},
};

/// What the endpoints for people with a problem are made of.
pub(super) struct ToolParts {
    /// The log.
    pub(super) log: LogHandle,
    /// Where health checks are counted.
    pub(super) slis: SliMetrics,
    /// The process start in seconds since the epoch.
    pub(super) started: i64,
    /// Which pods there are.
    pub(super) pods: Arc<dyn PodDirectory>,
    /// The runtime's.
    pub(super) checkpoints: Arc<dyn Checkpoints>,
}

/// What stands behind the endpoints for people with a problem.
pub(super) fn tools(loaded: &Loaded, parts: ToolParts) -> Tools {
    let ToolParts { log, slis, started, pods, checkpoints } = parts;
    let flags = loaded.flag_values.iter();
    Tools {
        slis,
        pods,
        checkpoints,
        statusz: Arc::new(Statusz {
            started: Timestamp::from_second(started).unwrap_or_default(),
            compiler: "rustc".to_owned(),
            version: loaded.version.trim_start_matches('v').to_owned(),
            emulated: "1.36".to_owned(),
        }),
        flags: Arc::new(flags.map(|(name, value)| ((*name).to_owned(), configz::masked_flag(name, value))).collect()),
        verbosity: Arc::new(log),
        node_logs: Arc::new(MachineLogs::default()),
        log_queries: loaded.config.enable_system_log_query,
        profiles: Arc::new(ProcessProfiles),
    }
}

impl Verbosity for LogHandle {
    fn set(&self, level: u32) {
        self.set_verbosity(level);
    }
}

/// Profiles of this process.
pub struct ProcessProfiles;

#[async_trait]
impl Profiles for ProcessProfiles {
    async fn processor(&self, time: Duration) -> Result<Bytes, ProfileError> {
        let sampling = Sampling::start().map_err(|refused| match refused {
            Refused::Busy => ProfileError::Busy,
            Refused::Kernel => ProfileError::Failed("the kernel refuses a timer".to_owned()),
        })?;
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        tokio::time::sleep(time).await;
        let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        let taken = Taken { at: nanos(at), duration: nanos(time), period: 1_000_000_000 / i64::from(PER_SECOND) };
        let written = tokio::task::spawn_blocking(move || {
            let stacks = sampling.stacks();
            drop(sampling);
            info!(samples = stacks.len(), "Took a profile");
            write(&stacks, taken)
        });
        let written = written.await.map_err(|error| ProfileError::Failed(error.to_string()))?;
        written.map_err(|error| ProfileError::Failed(error.to_string()))
    }

    fn command_line(&self) -> Bytes {
        let words: Vec<Vec<u8>> = std::env::args_os().map(OsStringExt::into_vec).collect();
        words.join(&0).into()
    }
}

fn write(stacks: &[Vec<u64>], taken: Taken) -> std::io::Result<Bytes> {
    let mapped = profile::mappings(&std::fs::read_to_string("/proc/self/maps")?);
    let profile = profile::processor(stacks, &mapped, taken, names);
    let mut zip = GzEncoder::new(Vec::new(), Compression::fast());
    zip.write_all(&profile.encode_to_vec())?;
    Ok(zip.finish()?.into())
}

/// What an address is called, as far as the program was not stripped.
fn names(address: u64) -> Vec<Named> {
    let mut found = Vec::new();
    let Ok(address) = usize::try_from(address) else { return found };
    backtrace::resolve(std::ptr::without_provenance_mut(address), |symbol| {
        if let Some(name) = symbol.name() {
            found.push(Named {
                function: name.to_string(),
                file: symbol.filename().map(|path| path.display().to_string()).unwrap_or_default(),
                line: i64::from(symbol.lineno().unwrap_or(0)),
            });
        }
    });
    found
}
