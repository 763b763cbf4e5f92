//! Follows the files that say who we are and whom we believe (spec 10 §8.3, 01 §10.2).
//!
//! What notifications miss is found every five minutes, or when somebody says so.

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
    identity::{CertifiedPair, Identity},
    kubeconfig::Source,
    trust::Trust,
};
use berth_metrics::{CaReload, TransportMetrics};
use berth_sys::file_watch::FileWatch;

/// How often files are read although nothing was noticed.
const PERIOD: Duration = Duration::from_secs(300);
/// How long after a change the others are waited for that belong to it.
const SETTLE: Duration = Duration::from_millis(100);
/// Longest read; a file system that hangs must not stop the rest.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is followed.
pub struct Follower {
    /// Client certificate and key, where they are ours to read.
    pub pair: Option<(Source, Source)>,
    /// The authorities.
    pub authorities: Option<Source>,
    /// Where the pair goes.
    pub identity: Identity,
    /// Moves when somebody else is set there.
    pub changes: watch::Receiver<u64>,
    /// Where the authorities go.
    pub trust: Arc<Trust>,
    /// Moves when connections are to be made anew.
    pub epoch: watch::Sender<u64>,
    /// Somebody says that files have changed.
    pub reload: Arc<Notify>,
    /// The authorities that are in use.
    pub believed: Vec<u8>,
    /// What is counted.
    pub metrics: TransportMetrics,
}

impl Follower {
    /// Follows until stopped.
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
                    info!("Certificate rotation detected, connections to the API server are made anew");
                    self.epoch.send_modify(|epoch| *epoch += 1);
                    continue;
                }
                () = self.reload.notified() => {}
                _ = ticks.tick() => {}
                () = watch.moved() => sleep(SETTLE).await,
            }
            watch.arm();
            let told = self.read().await.err();
            if let Some(cause) = told.as_ref().filter(|_| told != complaint) {
                error!(err = %cause, "Cannot load new TLS files, the old ones stay in use");
            }
            complaint = told;
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let pair = self.pair.iter().flat_map(|(certificate, key)| [certificate, key]);
        pair.chain(&self.authorities).filter_map(|source| source.file().map(Path::to_owned)).collect()
    }

    /// Reads what lies in files and uses what is new and good.
    async fn read(&mut self) -> Result<(), String> {
        if self.files().is_empty() {
            return Ok(());
        }
        let (pair, authorities) = (self.pair.clone(), self.authorities.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let text = |source: &Source| source.read().map_err(|e| e.to_string());
            let pair = pair.map(|(certificate, key)| Ok::<_, String>((text(&certificate)?, text(&key)?)));
            (pair, authorities.map(|source| text(&source)))
        });
        let late = |_| format!("the files cannot be read within {PATIENCE:?}");
        let (pair, authorities) = timeout(PATIENCE, reading).await.map_err(late)?.map_err(|e| e.to_string())?;
        let pair = pair.map_or(Ok(()), |read| self.show(read));
        let authorities = authorities.map_or(Ok(()), |read| {
            let (outcome, believed) = self.believe(read);
            self.metrics.looked_at_authorities(outcome);
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

    fn believe(&mut self, read: Result<Vec<u8>, String>) -> (CaReload, Result<(), String>) {
        let bundle = match read {
            Ok(bundle) if bundle == self.believed => return (CaReload::Unchanged, Ok(())),
            Ok(bundle) => bundle,
            Err(cause) => return (CaReload::ReadError, Err(cause)),
        };
        if let Err(cause) = self.trust.replace(&bundle) {
            return (if bundle.is_empty() { CaReload::Empty } else { CaReload::ParseError }, Err(cause));
        }
        self.believed = bundle;
        info!("Loaded new authorities of the API server");
        self.epoch.send_modify(|epoch| *epoch += 1);
        (CaReload::Updated, Ok(()))
    }
}
