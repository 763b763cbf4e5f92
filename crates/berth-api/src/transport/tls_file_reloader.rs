//! Reloader of TLS files: client certificate, key, and CA bundle (spec 10 §8.3, 01 §10.2).
//!
//! Changes that file notifications miss are found by a read every five minutes, or on request.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{Notify, watch},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::{
    identity::{CertifiedPair, ClientIdentity},
    kubeconfig::InlineOrFile,
    trust::ServerTrust,
};
use berth_metrics::{CaReload, TransportMetrics};
use berth_sys::file_watch::FileWatch;

/// Interval of reads without a notification.
const PERIOD: Duration = Duration::from_secs(300);
/// Debounce after a notification, so that related files are complete.
const SETTLE: Duration = Duration::from_millis(100);
/// Timeout of a read, so that a hung file system does not block the reloader.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reloader task and its targets.
pub struct TlsFileReloader {
    /// Client certificate and key, if the transport reads them itself.
    pub pair: Option<(InlineOrFile, InlineOrFile)>,
    /// CA bundle.
    pub authorities: Option<InlineOrFile>,
    /// Receives the client certificate.
    pub identity: ClientIdentity,
    /// Changes when the identity changes.
    pub changes: watch::Receiver<u64>,
    /// Receives the CA bundle.
    pub trust: Arc<ServerTrust>,
    /// Incremented to replace all connections.
    pub epoch: watch::Sender<u64>,
    /// Requests a reload.
    pub reload: Arc<Notify>,
    /// CA bundle in use, PEM.
    pub authorities_in_use: Vec<u8>,
    /// Metrics of transports.
    pub metrics: TransportMetrics,
}

impl TlsFileReloader {
    /// Runs until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut watch = FileWatch::new(self.files());
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut complaint = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Ok(()) = self.changes.changed() => {
                    info!("Certificate rotation detected, shutting down client connections to start using new credentials");
                    self.epoch.send_modify(|epoch| *epoch += 1);
                    continue;
                }
                () = self.reload.notified() => {}
                _ = ticks.tick() => {}
                () = watch.changed() => sleep(SETTLE).await,
            }
            watch.arm();
            let failure = self.read().await.err();
            if let Some(cause) = failure.as_ref().filter(|_| failure != complaint) {
                error!(err = %cause, "Failed to reload TLS files, using the previous ones");
            }
            complaint = failure;
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let pair = self.pair.iter().flat_map(|(certificate, key)| [certificate, key]);
        pair.chain(&self.authorities).filter_map(|source| source.file().map(Path::to_owned)).collect()
    }

    /// Reads all files and applies changed and valid content.
    async fn read(&mut self) -> Result<(), String> {
        if self.files().is_empty() {
            return Ok(());
        }
        let (pair, authorities) = (self.pair.clone(), self.authorities.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let text = |source: &InlineOrFile| source.read().map_err(|e| e.to_string());
            let pair = pair.map(|(certificate, key)| Ok::<_, String>((text(&certificate)?, text(&key)?)));
            (pair, authorities.map(|source| text(&source)))
        });
        let late = |_| format!("reading TLS files timed out after {PATIENCE:?}");
        let (pair, authorities) = timeout(PATIENCE, reading).await.map_err(late)?.map_err(|e| e.to_string())?;
        let pair = pair.map_or(Ok(()), |read| self.show(read));
        let authorities = authorities.map_or(Ok(()), |read| {
            let (outcome, believed) = self.reload_authorities(read);
            self.metrics.ca_reloaded(outcome);
            believed
        });
        pair.and(authorities)
    }

    fn show(&self, read: Result<(Vec<u8>, Vec<u8>), String>) -> Result<(), String> {
        let (certificate, key) = read?;
        let pair = CertifiedPair::from_pem(&certificate, &key).map_err(|e| format!("client certificate: {e}"))?;
        self.identity.set(Some(pair));
        Ok(())
    }

    fn reload_authorities(&mut self, read: Result<Vec<u8>, String>) -> (CaReload, Result<(), String>) {
        let bundle = match read {
            Ok(bundle) if bundle == self.authorities_in_use => return (CaReload::Unchanged, Ok(())),
            Ok(bundle) => bundle,
            Err(cause) => return (CaReload::ReadError, Err(cause)),
        };
        if let Err(cause) = self.trust.replace(&bundle) {
            return (if bundle.is_empty() { CaReload::Empty } else { CaReload::ParseError }, Err(cause));
        }
        self.authorities_in_use = bundle;
        info!("Reloaded CA bundle of the API server");
        self.epoch.send_modify(|epoch| *epoch += 1);
        (CaReload::Updated, Ok(()))
    }
}
