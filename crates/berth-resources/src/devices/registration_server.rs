//! Registration service on `device-plugins/kubelet.sock`. Spec 06c §1.1, §1.3.
//!
//! ```text
//!  plugin ─► kubelet.sock ─► Register ─► validation ─► Registrations::register
//! ```
//!
//! Plugins watch for the creation of the socket and register again: it is deleted and created at each start.

use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures::StreamExt;
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
};
use tokio::{
    net::UnixListener,
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, transport::Server};
use tracing::{error, info, warn};

use berth_cri::plugin_socket::GuardedStream;
use berth_proto::device_plugin::{
    Empty, RegisterRequest,
    registration_server::{Registration, RegistrationServer},
};
use berth_sys::{backoff::Backoff, grpc_deadline::Deadline, machine, selinux};
use berth_types::{cut_at_char, fieldpath::quoted, names, resources};

/// The supported version of the device plugin API.
const API_VERSION: &str = "v1beta1";
/// Name of the registration socket.
const SOCKET: &str = "kubelet.sock";
/// Mode of the directory where it is created.
const DIRECTORY_MODE: u32 = 0o750;
/// SELinux label of the directory, for plugins in unprivileged containers.
const SELINUX_LABEL: &str = "system_u:object_r:container_file_t:s0";
/// Back-off after failures.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
/// Grace period for open calls when the agent stops.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(5);
/// Maximum size of a request, in bytes.
const MESSAGE: usize = 64 << 10;
/// Maximum length of an error text or log field, in bytes.
const TEXT: usize = 1 << 10;
/// Maximum number of connections; further ones wait.
const CONNECTIONS: usize = 128;
/// Delay after a failed accept.
const ACCEPT_DELAY: Duration = Duration::from_secs(1);
/// Age at which a connection is closed once its calls have ended: clients may leak connections.
const CONNECTION_AGE: Duration = Duration::from_secs(60);
/// Time after [`CONNECTION_AGE`] at which a connection is closed with its calls.
const CONNECTION_GRACE: Duration = Duration::from_secs(30);
/// Maximum number of concurrent calls per connection.
const STREAMS: u32 = 16;
/// Maximum number of pending resets of a connection before it is closed.
const RESETS: usize = 20;

/// Receiver of the registrations of device plugins.
#[async_trait]
pub trait Registrations: Send + Sync + 'static {
    /// Called for each request before its validation, also for those that are refused later. Default: nothing.
    fn requested(&self, _resource: &str) {}

    /// Registers a plugin; replaces a previous one of the same resource.
    ///
    /// # Errors
    /// The text that the plugin receives.
    async fn register(&self, request: RegistrationRequest) -> Result<(), String>;
}

/// A valid registration request of a device plugin.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegistrationRequest {
    /// Version of the device plugin API.
    pub version: String,
    /// Absolute path of the plugin's socket.
    pub endpoint: PathBuf,
    /// Name of the extended resource.
    pub resource: String,
}

/// Starts a server in the directory. The future serves until `shutdown` and has to be spawned; the receiver contains
/// the reason why the server has failed, `None` while it has not.
///
/// Deletes all sockets of the directory once, logs failures, and retries with exponential back-off.
pub fn serve(
    directory: PathBuf,
    sink: Arc<dyn Registrations>,
    shutdown: CancellationToken,
) -> (watch::Receiver<Option<String>>, impl Future<Output = ()> + Send + 'static) {
    let (failure, receiver) = watch::channel(None);
    let service = RegistrationService { directory: directory.into(), sink };
    (receiver, run(service, failure, shutdown))
}

async fn run(service: RegistrationService, failure: watch::Sender<Option<String>>, shutdown: CancellationToken) {
    let (mut backoff, mut is_prepared) = (BACKOFF, false);
    loop {
        let error = match listen(&service.directory, &mut is_prepared) {
            Ok(listener) => {
                info!(path = %service.directory.display(), "Starting device plugin registration server");
                failure.send_replace(None);
                backoff.reset();
                match serve_listener(service.clone(), listener, &shutdown).await {
                    Ok(()) => return,
                    Err(error) => error.to_string(),
                }
            }
            Err(error) => error.to_string(),
        };
        if shutdown.is_cancelled() {
            return;
        }
        error!(err = error, "Failed to serve device plugin registration grpc server, retrying...");
        failure.send_replace(Some(error));
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sleep(backoff.next_delay()) => {}
        }
    }
}

async fn serve_listener(
    service: RegistrationService,
    listener: UnixListener,
    shutdown: &CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    let incoming = UnixListenerStream::new(listener).then(move |stream| {
        let slots = slots.clone();
        async move {
            match stream {
                Ok(stream) => {
                    let permit = slots.acquire_owned().await.map_err(io::Error::other)?;
                    Ok(GuardedStream::new(stream, permit))
                }
                Err(error) => {
                    warn!(err = %error, "Failed to accept connection of device plugin");
                    // tonic repeats a failed accept at once.
                    sleep(ACCEPT_DELAY).await;
                    Err(error)
                }
            }
        }
    });
    let serving = Server::builder()
        .max_concurrent_streams(STREAMS)
        .http2_max_pending_accept_reset_streams(Some(RESETS))
        .max_connection_age(CONNECTION_AGE)
        .max_connection_age_grace(CONNECTION_GRACE)
        .add_service(Deadline(RegistrationServer::new(service).max_decoding_message_size(MESSAGE)))
        .serve_with_incoming_shutdown(incoming, shutdown.clone().cancelled_owned());
    tokio::pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended,
        () = shutdown.cancelled() => {}
    }
    // Slower calls are aborted.
    timeout(SHUTDOWN_LIMIT, serving).await.unwrap_or(Ok(()))
}

/// Deletes and creates the socket. Not by renaming: plugins watch for its creation.
fn listen(directory: &Path, is_prepared: &mut bool) -> io::Result<UnixListener> {
    if !*is_prepared {
        prepare(directory)?;
        *is_prepared = true;
    }
    let path = directory.join(SOCKET);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Fails if the name was taken in the meantime, also by a link: the kernel does not follow it.
    UnixListener::bind(&path)
}

/// Creates the directory, labels it, and deletes all sockets in it: those of plugins of the previous run.
fn prepare(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)?;
    if machine::selinux_enabled()
        && let Err(error) = selinux::set_label(directory, SELINUX_LABEL)
    {
        warn!(
            path = %directory.display(),
            err = %error,
            "Unprivileged containerized plugins might not work. Could not set selinux context on socket dir"
        );
    }
    delete_sockets(directory)
}

/// Deletes the sockets of a directory. Keeps other files (checkpoint, links, directories), and sockets that cannot be
/// deleted.
fn delete_sockets(path: &Path) -> io::Result<()> {
    let directory = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let kind = match entry.file_type() {
            // The file system does not report types.
            FileType::Unknown => rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode)),
            kind => kind,
        };
        if kind != FileType::Socket {
            continue;
        }
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => {
                let path = path.join(&*name.to_string_lossy());
                warn!(path = %path.display(), err = %error, "Failed to delete socket of device plugin");
            }
        }
    }
    Ok(())
}

#[derive(Clone)]
struct RegistrationService {
    directory: Arc<Path>,
    sink: Arc<dyn Registrations>,
}

#[async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let resource = cut_at_char(&request.resource_name, TEXT).to_owned();
        info!(resourceName = %resource, "Got registration request from device plugin with resource");
        self.sink.requested(&resource);
        let registered = match validate(request, &self.directory) {
            Ok(request) => self.sink.register(request).await,
            Err(error) => Err(error),
        };
        registered.map(|()| Response::new(Empty {})).map_err(|error| {
            let error = cut_at_char(&error, TEXT);
            error!(err = error, resourceName = %resource, "Bad registration request from device plugin with resource");
            Status::unknown(error)
        })
    }
}

/// Validates a request for the plugin directory.
fn validate(request: RegisterRequest, directory: &Path) -> Result<RegistrationRequest, String> {
    let RegisterRequest { version, endpoint, resource_name: resource, .. } = request;
    if version != API_VERSION {
        let (version, supported) = (quoted(&version), quoted(API_VERSION));
        return Err(format!(
            "requested API version {version} is not supported by kubelet. Supported version is [{supported}]"
        ));
    }
    validate_resource_name(&resource)?;
    let is_file_name = !matches!(endpoint.as_str(), "" | "." | "..") && !endpoint.contains(['/', '\0']);
    if !is_file_name {
        let (endpoint, directory) = (quoted(&endpoint), directory.display());
        return Err(format!("invalid endpoint {endpoint}: expected the file name of a socket in {directory}"));
    }
    Ok(RegistrationRequest { version, endpoint: directory.join(endpoint), resource })
}

/// Checks that a name is that of an extended resource.
///
/// # Errors
/// `the ResourceName "…" is invalid`.
pub fn validate_resource_name(name: &str) -> Result<(), String> {
    // The name also has to be valid in a resource quota.
    let is_valid = resources::is_extended(name) && names::qualified_name(&format!("requests.{name}")).is_empty();
    if is_valid { Ok(()) } else { Err(format!("the ResourceName {} is invalid", quoted(name))) }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{
            fs::{PermissionsExt, symlink},
            net::UnixListener as BlockingListener,
        },
        sync::Mutex,
    };

    use berth_proto::device_plugin::registration_client::RegistrationClient;

    use super::*;

    fn request(version: &str, endpoint: &str, resource: &str) -> RegisterRequest {
        RegisterRequest {
            version: version.to_owned(),
            endpoint: endpoint.to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        }
    }

    #[test]
    fn the_api_version_is_checked_first() {
        // AC-06c-1
        for version in ["v1alpha", "", "v1", "v1beta1 "] {
            let error = validate(request(version, "", "foo"), Path::new("/d")).expect_err("unsupported");
            let expected = format!(
                "requested API version \"{version}\" is not supported by kubelet. Supported version is [\"v1beta1\"]"
            );
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn resources_have_the_names_of_extended_resources() {
        // AC-06c-2
        let long = format!("example.com/{}", "x".repeat(64));
        for (name, is_valid) in [
            ("example.com/foo", true),
            ("example.com/foo_1.2-x", true),
            ("foo", false),
            ("kubernetes.io/foo", false),
            ("x.kubernetes.io/foo", false),
            ("requests.example.com/foo", false),
            ("example.com/", false),
            ("/foo", false),
            ("a/b/c", false),
            ("Example.com/foo", false),
            ("example.com/foo bar", false),
            ("example.com/foo\0", false),
            ("", false),
            (long.as_str(), false),
        ] {
            let expected = if is_valid { Ok(()) } else { Err(format!("the ResourceName {} is invalid", quoted(name))) };
            assert_eq!(validate_resource_name(name), expected);
            let valid = validate(request("v1beta1", "foo.sock", name), Path::new("/d"));
            assert_eq!(valid.map(drop), expected);
        }
    }

    #[test]
    fn endpoints_are_file_names() {
        let directory = Path::new("/var/lib/kubelet/device-plugins");
        for (endpoint, is_valid) in [
            ("foo.sock", true),
            ("...", true),
            ("", false),
            (".", false),
            ("..", false),
            ("../foo.sock", false),
            ("/foo.sock", false),
            ("foo/", false),
            ("foo\0", false),
        ] {
            let found = validate(request("v1beta1", endpoint, "example.com/foo"), directory);
            let expected = if is_valid {
                Ok(RegistrationRequest {
                    version: "v1beta1".to_owned(),
                    endpoint: directory.join(endpoint),
                    resource: "example.com/foo".to_owned(),
                })
            } else {
                let (endpoint, directory) = (quoted(endpoint), directory.display());
                Err(format!("invalid endpoint {endpoint}: expected the file name of a socket in {directory}"))
            };
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn only_sockets_are_deleted_at_start() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = root.path().join("device-plugins");
        prepare(&directory).expect("created");
        let mode = std::fs::metadata(&directory).expect("created").permissions().mode() & 0o7777;
        assert_eq!(mode & !DIRECTORY_MODE, 0, "{mode:o}");
        let outside = root.path().join("outside.sock");
        let at = |name: &str| directory.join(name);
        let sockets = [at("a.sock"), at("kubelet.sock"), outside.clone()];
        let _listeners = sockets.map(|path| BlockingListener::bind(path).expect("bound"));
        std::fs::write(at("kubelet_internal_checkpoint"), "{}").expect("written");
        std::fs::create_dir(at("directory")).expect("created");
        symlink(&outside, at("link")).expect("linked");

        prepare(&directory).expect("prepared");
        let names = std::fs::read_dir(&directory).expect("readable");
        let mut names: Vec<_> = names.map(|entry| entry.expect("readable").file_name()).collect();
        names.sort();
        assert_eq!(names, ["directory", "kubelet_internal_checkpoint", "link"]);
        assert!(outside.exists());
    }

    #[derive(Default)]
    struct Recorder {
        requested: Mutex<Vec<String>>,
        registered: Mutex<Vec<RegistrationRequest>>,
    }

    #[async_trait]
    impl Registrations for Recorder {
        fn requested(&self, resource: &str) {
            self.requested.lock().expect("not poisoned").push(resource.to_owned());
        }

        async fn register(&self, request: RegistrationRequest) -> Result<(), String> {
            let is_refused = request.resource == "example.com/refused";
            self.registered.lock().expect("not poisoned").push(request);
            if is_refused { Err("failed to dial device plugin: x".to_owned()) } else { Ok(()) }
        }
    }

    #[tokio::test]
    async fn plugins_register_at_the_socket() {
        // AC-06c-1, AC-06c-2
        let directory = tempfile::tempdir().expect("a directory");
        let (sink, shutdown) = (Arc::new(Recorder::default()), CancellationToken::new());
        let (failure, serving) = serve(directory.path().to_owned(), sink.clone(), shutdown.clone());
        let server = tokio::spawn(serving);
        let socket = directory.path().join(SOCKET);
        timeout(Duration::from_secs(60), async {
            while tokio::net::UnixStream::connect(&socket).await.is_err() {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the server listens");
        let mut client = RegistrationClient::new(berth_cri::socket_channel(socket));
        for (message, expected) in [
            (request("v1beta1", "foo.sock", "example.com/foo"), None),
            (
                request("v1alpha", "foo.sock", "example.com/foo"),
                Some(
                    "requested API version \"v1alpha\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
                ),
            ),
            (request("v1beta1", "foo.sock", "foo"), Some("the ResourceName \"foo\" is invalid")),
            (request("v1beta1", "foo.sock", "example.com/refused"), Some("failed to dial device plugin: x")),
        ] {
            let error = client.register(message).await.err();
            let error = error.as_ref().map(|status| (status.code(), status.message()));
            assert_eq!(error, expected.map(|text| (tonic::Code::Unknown, text)));
        }
        let requested = sink.requested.lock().expect("not poisoned").clone();
        assert_eq!(requested, ["example.com/foo", "example.com/foo", "foo", "example.com/refused"]);
        let registered = sink.registered.lock().expect("not poisoned").clone();
        let endpoints: Vec<_> = registered.iter().map(|request| request.endpoint.clone()).collect();
        assert_eq!(endpoints, vec![directory.path().join("foo.sock"); 2]);
        assert_eq!(*failure.borrow(), None);
        drop(client);
        shutdown.cancel();
        server.await.expect("no panic");
    }
}
