//! Holds the lock for which logind waits, and hears from it that the machine goes down. Behaviour: spec 05 §7.2.

use std::{io, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::drain::{Cause, Drain};
use crate::{
    config::GoDuration,
    sys::{
        atomic_file,
        logind::{Heard, Logind, LogindError, Session},
    },
};

/// Pause before a lost bus is looked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// How often, and after which first pause, it is looked whether logind waits longer now.
const LOOKS: u32 = 5;
const FIRST_LOOK: Duration = Duration::from_millis(100);
/// What stands first in the file by which logind is told to wait longer.
const MARK: &str = "# Kubelet logind override";
const MODE: u32 = 0o644;

/// Why the machine's end is not heard of.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error(transparent)]
    Logind(#[from] LogindError),
    #[error("cannot write {path}: {cause}")]
    Override { path: String, cause: io::Error },
    #[error(
        "node shutdown manager was timed out after 5 attempts waiting for logind InhibitDelayMaxSec to update to \
         {wanted} (ShutdownGracePeriod), current value is {current}"
    )]
    TooShort { wanted: GoDuration, current: GoDuration },
}

/// The file by which logind is told to wait longer.
#[derive(Clone, Debug)]
pub struct Override(pub PathBuf);

impl Default for Override {
    fn default() -> Self {
        Self("/etc/systemd/logind.conf.d/99-kubelet.conf".into())
    }
}

impl Override {
    fn content(period: Duration) -> String {
        format!("{MARK}\n[Login]\nInhibitDelayMaxSec={}\n", period.as_secs_f64().ceil())
    }

    /// Written where it says something else.
    async fn write(&self, period: Duration) -> Result<(), KeepError> {
        let (path, content) = (self.0.clone(), Self::content(period));
        let write = move || {
            if std::fs::read_to_string(&path).is_ok_and(|now| now == content) {
                return Ok(());
            }
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            atomic_file::replace(&path, content.as_bytes(), MODE)
        };
        let written = spawn_blocking(write).await.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|cause| KeepError::Override { path: self.0.display().to_string(), cause })
    }

    /// Removes it where we wrote it: nobody is waited for any more.
    pub async fn remove(self) {
        let remove = move || {
            let ours = std::fs::read_to_string(&self.0).is_ok_and(|content| content.starts_with(MARK));
            if ours { std::fs::remove_file(&self.0) } else { Ok(()) }
        };
        if let Ok(Err(error)) = spawn_blocking(remove).await {
            warn!(err = %error, "The file by which logind waits for pods stays");
        }
    }
}

/// Hears of the machine's end; see the file's documentation.
pub struct Keeper {
    logind: Logind,
    drain: Arc<Drain>,
    file: Override,
}

impl Keeper {
    /// Nothing is asked yet.
    pub fn new(logind: Logind, drain: Arc<Drain>, file: Override) -> Self {
        Self { logind, drain, file }
    }

    /// Listens until stopped; looks for the bus again whenever it is lost.
    pub async fn run(self, stop: CancellationToken) {
        let mut told = String::new();
        while let Some(ended) = stop.run_until_cancelled(self.listen()).await {
            let text = ended.to_string();
            if text != told {
                warn!(err = %text, "Cannot hear of the machine's shutdown, trying again every second");
                told = text;
            }
            if stop.run_until_cancelled(sleep(AGAIN)).await.is_none() {
                return;
            }
        }
    }

    /// Listens as long as there is a bus; why there is none.
    async fn listen(&self) -> KeepError {
        match self.hear().await {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    async fn hear(&self) -> Result<std::convert::Infallible, KeepError> {
        let mut session = self.logind.connect().await?;
        let mut lock = self.lock(&session).await?;
        loop {
            let begins = match session.next().await? {
                Heard::Begins(begins) => begins,
                // A soft reboot ends processes as any other: what it leaves running is no business of ours.
                Heard::How(how) => {
                    info!(how, "logind tells how the machine goes down");
                    continue;
                }
            };
            // Anybody on the bus may send us a signal; what logind itself says counts.
            if session.is_preparing().await? != begins {
                continue;
            }
            if begins {
                self.drain.begin(Cause::Machine).await;
                drop(lock.take()); // logind waits for nobody else of us
            } else {
                self.stays().await;
                lock = Some(session.inhibit().await?);
            }
        }
    }

    /// A lock long enough for all pods. What was missed while there was no bus is made up for.
    async fn lock(&self, session: &Session) -> Result<Option<OwnedFd>, KeepError> {
        match session.is_preparing().await? {
            true => {
                self.drain.begin(Cause::Machine).await;
                return Ok(None); // there is none to be had any more
            }
            false => self.stays().await,
        }
        match self.make_room(session).await {
            // A short delay is better than none.
            Err(error @ (KeepError::TooShort { .. } | KeepError::Override { .. })) => {
                warn!(err = %error, "Pods get less time than configured when the machine goes down");
            }
            other => other?,
        }
        let lock = session.inhibit().await?;
        info!(period = ?self.drain.total(), "Holding a lock that delays the machine's shutdown");
        Ok(Some(lock))
    }

    /// The machine stays; who else lets pods go says when that is over.
    async fn stays(&self) {
        if let Err(cause) = self.drain.cancel(Cause::Machine).await {
            debug!(?cause, "The machine stays, and pods go for another reason");
        }
    }

    async fn make_room(&self, session: &Session) -> Result<(), KeepError> {
        let wanted = self.drain.total();
        if session.longest_delay().await? >= wanted {
            return Ok(());
        }
        self.file.write(wanted).await?;
        session.reload().await?;
        let (mut pause, mut current) = (FIRST_LOOK, Duration::ZERO);
        for _ in 0..LOOKS {
            current = session.longest_delay().await?;
            if current >= wanted {
                return Ok(());
            }
            sleep(pause).await;
            pause *= 2;
        }
        let seconds = |period: Duration| GoDuration::from_secs(i64::try_from(period.as_secs()).unwrap_or(i64::MAX));
        Err(KeepError::TooShort { wanted: seconds(wanted), current: seconds(current) })
    }
}
