//! Root-only Unix socket behind `berth drain` and `berth drain --cancel`; needs no D-Bus.
//!
//! Implements spec 05 §7.7.
//!
//! ```text
//!  ► drain     ◄ begun 30     ◄ done        once pods are terminated, or their time is over
//!  ► cancel    ◄ done                       or: refused <why>
//! ```
//!
//! One line per message, one request per connection. A drain continues even if its client disconnects.

use std::{
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::drain::{Drain, DrainCause};

/// Mode of the socket: accessible to its owner only.
const MODE: u32 = 0o600;
/// Maximum length of a request, in bytes.
const LONGEST: u64 = 64;
/// Timeout for receiving a request, and for sending a response line.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of concurrent connections.
const ASKERS: usize = 8;
/// Retry delay after a failed accept or bind.
const PAUSE: Duration = Duration::from_secs(1);
/// UID of root.
const ROOT: u32 = 0;

/// Request of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrainRequest {
    /// Terminate all pods, and admit no new ones.
    Drain,
    /// Admit pods again.
    Cancel,
}

impl DrainRequest {
    /// The request line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Drain => "drain",
            Self::Cancel => "cancel",
        }
    }
}

impl FromStr for DrainRequest {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let known = [Self::Drain, Self::Cancel].into_iter().find(|ask| ask.as_str() == line);
        known.ok_or_else(|| format!("unknown request {line:?}: expected drain or cancel"))
    }
}

/// Response to a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DrainResponse {
    /// The drain has started and takes at most that many seconds; another response follows.
    Begun(u64),
    /// The request is completed.
    Done,
    /// The request is refused, with the reason.
    Refused(String),
}

impl DrainResponse {
    fn line(&self) -> String {
        match self {
            Self::Begun(seconds) => format!("begun {seconds}\n"),
            Self::Done => "done\n".to_owned(),
            Self::Refused(why) => format!("refused {}\n", why.replace('\n', " ")),
        }
    }
}

impl FromStr for DrainResponse {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match (word, rest.parse()) {
            ("begun", Ok(seconds)) => Ok(Self::Begun(seconds)),
            ("done", _) => Ok(Self::Done),
            ("refused", _) => Ok(Self::Refused(rest.to_owned())),
            _ => Err(format!("invalid response {line:?}")),
        }
    }
}

/// Server of the drain socket; see the module documentation.
pub struct DrainSocket {
    path: PathBuf,
    drain: Arc<Drain>,
}

impl DrainSocket {
    /// Name of the socket in the agent's directory.
    pub const NAME: &'static str = "drain.sock";

    /// Creates the server; [`Self::run`] creates the socket.
    pub fn new(path: PathBuf, drain: Arc<Drain>) -> Self {
        Self { path, drain }
    }

    /// Serves requests until stopped.
    pub async fn run(self, stop: CancellationToken) {
        let Some(listener) = stop.run_until_cancelled(self.listen()).await else { return };
        let mut askers = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(_) = askers.join_next(), if !askers.is_empty() => {}
                taken = listener.accept(), if askers.len() < ASKERS => match taken {
                    Ok((stream, _)) => drop(askers.spawn(answer(stream, self.drain.clone()))),
                    Err(error) => {
                        warn!(err = %error, path = %self.path.display(), "Failed to accept connection on drain socket");
                        sleep(PAUSE).await;
                    }
                },
            }
        }
        // The socket file stays: another agent may have replaced it since.
        drop(listener);
    }

    /// Retries until the socket is bound; logs a failure once.
    async fn listen(&self) -> UnixListener {
        let mut has_warned = false;
        loop {
            match bind(&self.path) {
                Ok(listener) => return listener,
                Err(error) if !has_warned => {
                    warn!(err = %error, path = %self.path.display(), "Failed to listen on drain socket, retrying every second");
                    has_warned = true;
                }
                Err(_) => {}
            }
            sleep(PAUSE).await;
        }
    }
}

/// Binds a temporary name and renames it: the socket never appears before it is listening with its
/// final mode.
fn bind(path: &Path) -> io::Result<UnixListener> {
    let beside = path.with_extension("new");
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&beside)?;
    std::fs::set_permissions(&beside, PermissionsExt::from_mode(MODE))?;
    std::fs::rename(&beside, path)?;
    Ok(listener)
}

/// Whether a user may send requests to an agent of user `agent`.
const fn may_ask(user: u32, agent: u32) -> bool {
    user == ROOT || user == agent
}

/// Serves one connection.
async fn answer(stream: UnixStream, drain: Arc<Drain>) {
    let peer = stream.peer_cred().map(|peer| (peer.uid(), peer.pid()));
    let (read, mut write) = stream.into_split();
    let (user, pid) = match peer {
        Ok(peer) => peer,
        Err(error) => return warn!(err = %error, "Failed to get peer credentials on drain socket"),
    };
    if !may_ask(user, rustix::process::geteuid().as_raw()) {
        warn!(user, pid, "Rejected drain request, permission denied");
        return respond(
            &mut write,
            DrainResponse::Refused("permission denied: only root may drain this node".to_owned()),
        )
        .await;
    }
    let mut line = String::new();
    let asked = timeout(PATIENCE, BufReader::new(read.take(LONGEST)).read_line(&mut line)).await;
    if !matches!(asked, Ok(Ok(_))) {
        return respond(&mut write, DrainResponse::Refused("no request received".to_owned())).await;
    }
    let ask = match line.trim_end().parse() {
        Ok(ask) => ask,
        Err(why) => return respond(&mut write, DrainResponse::Refused(why)).await,
    };
    info!(user, pid, ?ask, "Received drain request");
    let response = match ask {
        DrainRequest::Drain => {
            respond(&mut write, DrainResponse::Begun(drain.total().as_secs())).await;
            drain.begin(DrainCause::Requested).await;
            DrainResponse::Done
        }
        // Would wait for the whole drain, and then admit pods when the client no longer expects it.
        DrainRequest::Cancel if drain.goes_on() => {
            DrainResponse::Refused("drain in progress, retry after it has completed".to_owned())
        }
        DrainRequest::Cancel => match drain.cancel(DrainCause::Requested).await {
            Ok(()) => DrainResponse::Done,
            Err(DrainCause::Machine) => DrainResponse::Refused("machine is shutting down".to_owned()),
            Err(DrainCause::Terminated | DrainCause::Requested) => {
                DrainResponse::Refused("agent is shutting down".to_owned())
            }
        },
    };
    respond(&mut write, response).await;
}

/// A client that does not read is not waited for.
async fn respond(write: &mut (impl AsyncWriteExt + Unpin), answer: DrainResponse) {
    let _ = timeout(PATIENCE, write.write_all(answer.line().as_bytes())).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_responses_round_trip() {
        for ask in [DrainRequest::Drain, DrainRequest::Cancel] {
            assert_eq!(ask.as_str().parse(), Ok(ask));
        }
        assert!("reboot".parse::<DrainRequest>().is_err() && "".parse::<DrainRequest>().is_err());
        for answer in [
            DrainResponse::Begun(30),
            DrainResponse::Done,
            DrainResponse::Refused("machine is shutting down".to_owned()),
        ] {
            assert_eq!(answer.line().trim_end().parse(), Ok(answer));
        }
        for line in ["", "begun", "begun soon", "what"] {
            assert!(line.parse::<DrainResponse>().is_err(), "{line}");
        }
    }

    #[test]
    fn only_root_and_the_agents_own_user_may_ask() {
        for (user, agent, may) in [(0, 0, true), (0, 7, true), (7, 7, true), (7, 0, false), (7, 8, false)] {
            assert_eq!(may_ask(user, agent), may, "{user} {agent}");
        }
    }
}
