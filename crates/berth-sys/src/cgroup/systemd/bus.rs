//! systemd D-Bus client: one shared connection, opened on first use and reopened after a loss.

use std::{
    fmt,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::{net::UnixStream, runtime::Handle, sync::Mutex, task::JoinHandle, time::timeout};
use tokio_stream::StreamExt;
use zbus::{
    Connection, MatchRule, Message, MessageStream, OwnedObjectPath, OwnedVariant, Variant, connection::Builder,
    message::Type,
};

use super::{Property, PropertyValue, Release, UnitError, Units, jobs::Jobs};

/// Exists if systemd is process 1.
const RUNNING: &str = "/run/systemd/system";
/// Socket of the system bus.
const BUS: &str = "/run/dbus/system_bus_socket";
const SERVICE: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
/// Job mode: a new job replaces conflicting pending jobs.
const MODE: &str = "replace";
/// Timeouts of the connection, a reply, and a job.
const CONNECT: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(15);
const JOB: Duration = Duration::from_secs(30);
/// Connection attempts while the socket's queue is full, and the first delay, which doubles each time.
const ATTEMPTS: u32 = 7;
const PAUSE: Duration = Duration::from_millis(100);

/// Whether systemd is this machine's service manager.
pub fn is_running() -> bool {
    Path::new(RUNNING).is_dir()
}

/// Address of systemd.
#[derive(Clone, Debug)]
enum BusAddress {
    /// The system bus. On its private socket systemd uses a sender name that is not a peer's, which zbus refuses.
    Machine,
    /// A peer-to-peer connection to this socket, without a bus.
    Socket(PathBuf),
}

/// Client of systemd. Its calls block: they must not run on a thread that drives async tasks.
pub struct Bus {
    place: BusAddress,
    runtime: Handle,
    link: Mutex<Option<Arc<BusConnection>>>,
}

/// A connection and its pending jobs.
struct BusConnection {
    connection: Connection,
    release: Release,
    jobs: Jobs,
    listening: JoinHandle<()>,
}

impl Drop for BusConnection {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bus").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Bus {
    /// Client of this machine's systemd. Must be called within a runtime; does not connect yet.
    ///
    /// # Errors
    /// A text for people if systemd is not running.
    pub fn of_this_machine() -> Result<Self, &'static str> {
        if is_running() { Ok(Self::new(BusAddress::Machine)) } else { Err(super::NOT_RUNNING) }
    }

    /// Client of a peer-to-peer D-Bus server on that socket. Must be called within a runtime.
    pub fn at(socket: PathBuf) -> Self {
        Self::new(BusAddress::Socket(socket))
    }

    fn new(place: BusAddress) -> Self {
        Self { place, runtime: Handle::current(), link: Mutex::new(None) }
    }

    /// Performs a call, and repeats it once on a new connection if the old one was lost.
    fn call_with_retry<T>(
        &self,
        question: impl AsyncFn(&BusConnection) -> Result<T, CallFailure>,
    ) -> Result<T, UnitError> {
        self.runtime.block_on(async {
            let link = self.link().await?;
            let result = match question(&link).await {
                Err(CallFailure::Lost(_)) => {
                    self.forget(&link).await;
                    question(&*self.link().await?).await
                }
                result => result,
            };
            result.map_err(|failure| match failure {
                CallFailure::Lost(text) => UnitError::Bus(text),
                CallFailure::Refused(error) => error,
            })
        })
    }

    async fn link(&self) -> Result<Arc<BusConnection>, UnitError> {
        let mut now = self.link.lock().await;
        if let Some(link) = now.as_ref().filter(|link| !link.connection.is_closed()) {
            return Ok(link.clone());
        }
        let made = timeout(CONNECT, connect(&self.place)).await;
        let connection = made.map_err(|_| UnitError::Bus(format!("no connection within {CONNECT:?}")))?;
        let link = Arc::new(BusConnection::new(connection.map_err(|e| UnitError::Bus(e.to_string()))?).await?);
        *now = Some(link.clone());
        Ok(link)
    }

    async fn forget(&self, lost: &Arc<BusConnection>) {
        let mut now = self.link.lock().await;
        if now.as_ref().is_some_and(|link| Arc::ptr_eq(link, lost)) {
            *now = None;
        }
    }
}

async fn connect(place: &BusAddress) -> zbus::Result<Connection> {
    match place {
        BusAddress::Machine => Builder::unix_stream(dial(Path::new(BUS)).await?).build().await,
        BusAddress::Socket(path) => Builder::unix_stream(dial(path).await?).p2p().build().await,
    }
}

/// Connects, with retries while the socket's queue is full.
async fn dial(path: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let mut pause = PAUSE;
    for _ in 1..ATTEMPTS {
        match UnixStream::connect(path).await {
            Err(e) if e.kind() == ErrorKind::WouldBlock => tokio::time::sleep(pause).await,
            other => return other?.into_std(),
        }
        pause *= 2;
    }
    UnixStream::connect(path).await?.into_std()
}

/// Why a call failed.
enum CallFailure {
    /// The connection was lost.
    Lost(String),
    /// systemd returned an error.
    Refused(UnitError),
}

/// Operation and unit of a call, for errors.
#[derive(Clone, Copy)]
struct UnitOperation<'a> {
    what: &'static str,
    unit: &'a str,
}

impl UnitOperation<'_> {
    fn failure(self, error: zbus::Error) -> CallFailure {
        let unit = self.unit.to_owned();
        if let zbus::Error::MethodError(name, text, _) = &error {
            let refused = || UnitError::Refused {
                what: self.what,
                unit: unit.clone(),
                text: text.clone().unwrap_or_else(|| name.to_string()),
            };
            return CallFailure::Refused(match name.rsplit('.').next() {
                Some("UnitExists") => UnitError::Exists(unit),
                Some("NoSuchUnit") => UnitError::Missing(unit),
                _ => refused(),
            });
        }
        match error {
            zbus::Error::FDO(error) => {
                CallFailure::Refused(UnitError::Refused { what: self.what, unit, text: error.to_string() })
            }
            other => CallFailure::Lost(other.to_string()),
        }
    }

    fn silent(self) -> CallFailure {
        CallFailure::Refused(UnitError::NoAnswer(format!("{} unit {}", self.what, self.unit)))
    }
}

impl BusConnection {
    async fn new(connection: Connection) -> Result<Self, UnitError> {
        let to_unit_error = |error: zbus::Error| UnitError::Bus(error.to_string());
        let rule = MatchRule::builder().msg_type(Type::Signal).interface(MANAGER).member("JobRemoved").build();
        let stream =
            timeout(ANSWER, MessageStream::for_match_rule(rule.map_err(to_unit_error)?, &connection, None)).await;
        let stream =
            stream.map_err(|_| UnitError::NoAnswer("D-Bus connection setup".to_owned()))?.map_err(to_unit_error)?;
        let jobs = Jobs::default();
        let listening = tokio::spawn(listen(stream, jobs.clone()));
        let mut link = Self { connection, release: Release::default(), jobs, listening };
        link.release = link.query_release().await;
        Ok(link)
    }

    /// Queries the release. A failure is no reason to run no pods: it counts as unknown.
    async fn query_release(&self) -> Release {
        let asked = self.connection.call_method(
            Some(SERVICE),
            OBJECT,
            Some("org.freedesktop.DBus.Properties"),
            "Get",
            &(MANAGER, "Version"),
        );
        let answer = match timeout(ANSWER, asked).await {
            Ok(answer) => answer.and_then(|answer| answer.body().deserialize::<OwnedVariant>()),
            Err(_) => Err(zbus::Error::Failure("no response".to_owned())),
        };
        match answer.and_then(|value| String::try_from(value).map_err(|_| zbus::Error::IncorrectType)) {
            Ok(text) => Release::parse(&text),
            Err(error) => {
                tracing::warn!(err = %error, "Failed to read systemd version");
                Release::default()
            }
        }
    }

    async fn call<B>(&self, about: UnitOperation<'_>, method: &'static str, body: &B) -> Result<Message, CallFailure>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let asked = self.connection.call_method(Some(SERVICE), OBJECT, Some(MANAGER), method, body);
        match timeout(ANSWER, asked).await {
            Ok(answer) => answer.map_err(|error| about.failure(error)),
            Err(_) => Err(about.silent()),
        }
    }

    /// Starts a job and waits for its result.
    async fn job<B>(&self, about: UnitOperation<'_>, method: &'static str, body: &B) -> Result<(), CallFailure>
    where
        B: serde::Serialize + zbus::DynamicType,
    {
        let asking = self.jobs.begin_call();
        let answer = self.call(about, method, body).await?;
        let job: OwnedObjectPath = answer.body().deserialize().map_err(|error| about.failure(error))?;
        let result = match timeout(JOB, asking.named(job.as_str())).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => return Err(CallFailure::Lost("connection closed before the job completed".to_owned())),
            Err(_) => return Err(about.silent()),
        };
        if result == "done" {
            return Ok(());
        }
        Err(CallFailure::Refused(UnitError::Job { what: about.what, unit: about.unit.to_owned(), result }))
    }
}

/// Delivers job results to their waiters until the connection ends.
async fn listen(mut stream: MessageStream, jobs: Jobs) {
    while let Some(message) = stream.next().await {
        let Ok(message) = message else { break };
        let job_removed = message.body().deserialize::<(u32, OwnedObjectPath, String, String)>();
        if let Ok((_, job, _, result)) = job_removed {
            jobs.ended(job.as_str().to_owned(), result);
        }
    }
    jobs.cancel_all();
}

/// Properties in D-Bus form: names and variants.
fn on_the_wire(properties: &[Property]) -> Vec<(&'static str, Variant<'_>)> {
    let variant = |value: &'_ PropertyValue| match value {
        PropertyValue::Flag(flag) => Variant::new(*flag),
        PropertyValue::Number(number) => Variant::new(*number),
        PropertyValue::Text(text) => Variant::new(text.clone()),
        PropertyValue::Names(names) => Variant::new(names.clone()),
        PropertyValue::Bytes(bytes) => Variant::new(bytes.clone()),
        PropertyValue::Processes(pids) => Variant::new(pids.clone()),
    };
    properties.iter().map(|property| (property.name, variant(&property.value))).collect()
}

impl Units for Bus {
    fn release(&self) -> Result<Release, UnitError> {
        self.call_with_retry(async |link| Ok(link.release))
    }

    fn start(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError> {
        let about = UnitOperation { what: "start", unit };
        let none: Vec<(&str, Vec<(&str, Variant<'_>)>)> = Vec::new();
        let body = (unit, MODE, on_the_wire(properties), none);
        self.call_with_retry(async |link| link.job(about, "StartTransientUnit", &body).await)
    }

    fn set(&self, unit: &str, properties: &[Property]) -> Result<(), UnitError> {
        if properties.is_empty() {
            return Ok(());
        }
        let about = UnitOperation { what: "change", unit };
        let body = (unit, true, on_the_wire(properties));
        self.call_with_retry(async |link| link.call(about, "SetUnitProperties", &body).await.map(drop))
    }

    fn stop(&self, unit: &str) -> Result<(), UnitError> {
        let about = UnitOperation { what: "stop", unit };
        self.call_with_retry(async |link| link.job(about, "StopUnit", &(unit, MODE)).await)
    }

    fn reset_failed(&self, unit: &str) -> Result<(), UnitError> {
        let about = UnitOperation { what: "forget", unit };
        self.call_with_retry(async |link| link.call(about, "ResetFailedUnit", &(unit,)).await.map(drop))
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    use tokio::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_is_waited_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("bus");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket");
        bind(&socket, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
        listen(&socket, 0).expect("listens");
        let listener = UnixListener::from_std(socket.into()).expect("a listener");
        let _first = UnixStream::connect(&path).await.expect("there is room for one");
        let full = UnixStream::connect(&path).await.expect_err("and not for two");
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
        // The dial starts before the first connection is accepted.
        let (dialled, accepted) = tokio::join!(dial(&path), listener.accept());
        dialled.expect("there is room again");
        accepted.expect("the first");
        let nowhere = dial(&dir.path().join("nowhere")).await.expect_err("no listener");
        assert_eq!(nowhere.kind(), ErrorKind::NotFound, "reported at once");
    }
}
