//! Sample DRA driver on a real Unix socket, with recorded calls, CDI spec files, and fault injection.
//!
//! Serves `DRAPlugin` v1 and v1beta1, and `DRAResourceHealth`; registers by the plugin watcher. As the contract
//! demands, calls are idempotent, and claims may be unprepared without having been prepared. Spec 06c §3.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs, io,
    path::{self, Path, PathBuf},
    sync::Arc,
};

use futures::{StreamExt, stream, stream::BoxStream};
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::{Request, Response, Status, service::Routes};

use berth_proto::{
    dra_v1::{self, Claim, Device, NodePrepareResourceResponse, dra_plugin_server::DraPluginServer},
    dra_v1beta1::{self, dra_plugin_server::DraPluginServer as V1beta1Server},
    v1alpha1::{
        DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
        dra_resource_health_server::{DraResourceHealth, DraResourceHealthServer},
    },
};

use crate::{
    csi::{Plugin, RegistrationBehavior},
    plugin_server::{PluginFault, PluginServer, ServiceScript},
};

/// Name of the v1 service in the registration.
pub const V1: &str = "v1.DRAPlugin";
/// Name of the v1beta1 service in the registration.
pub const V1BETA1: &str = "v1beta1.DRAPlugin";
/// Name of the health service in the registration.
pub const HEALTH: &str = "v1alpha1.DRAResourceHealth";

/// Pool of all devices that the driver prepares by default.
pub const POOL: &str = "pool";

/// Method of the driver's services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "named as in the API")]
pub enum DriverMethod {
    NodePrepareResources,
    NodeUnprepareResources,
    NodeWatchResources,
}

/// Recorded call; recorded on arrival, so hanging and failing calls are included.
#[derive(Clone, Debug, PartialEq)]
pub struct DriverCall {
    /// Called method.
    pub method: DriverMethod,
    /// Called service: [`V1`], [`V1BETA1`], or [`HEALTH`].
    pub service: &'static str,
    /// Claims of the request, in its order; empty for `NodeWatchResources`.
    pub claims: Vec<Claim>,
}

/// Function from a claim to its prepared devices.
pub type DeviceResponder = Arc<dyn Fn(&Claim) -> Vec<Device> + Send + Sync>;

/// Answers of a driver; changeable while it runs.
#[derive(Clone, Default)]
pub struct DriverBehavior {
    /// Errors of single claims by method and claim name; other claims of the same call succeed.
    pub claim_errors: BTreeMap<(DriverMethod, String), String>,
    /// Builds the devices of a claim; `None` prepares [`default_devices`] without request names.
    pub devices: Option<DeviceResponder>,
    /// Number of claims per call that are carried out and answered, in request order; `None` is all of them.
    pub answered_claims: Option<usize>,
    /// Claim UIDs of additional, empty results that no call requests.
    pub unknown_uids: Vec<String>,
    /// Directory of the CDI spec files; `None` writes no files.
    pub cdi_directory: Option<PathBuf>,
}

/// Devices of a claim in [`POOL`], one per request.
///
/// At most one request: device `dev-<claim name>` with the CDI ID `<kind>=<claim uid>`; without a request it lists no
/// request names, which means all. Several: `dev-<claim name>-<request>` with `<kind>=<claim uid>-<request>`.
pub fn default_devices(cdi_kind: &str, claim: &Claim, requests: &[&str]) -> Vec<Device> {
    let device = |suffix: &str, requests: &[&str]| Device {
        request_names: requests.iter().map(|request| (*request).to_owned()).collect(),
        pool_name: POOL.to_owned(),
        device_name: format!("dev-{}{suffix}", claim.name),
        cdi_device_ids: vec![format!("{cdi_kind}={}{suffix}", claim.uid)],
        ..Default::default()
    };
    match requests {
        [] | [_] => vec![device("", requests)],
        several => several.iter().map(|request| device(&format!("-{request}"), &[*request])).collect(),
    }
}

/// Health of a device for [`SampleDriver::set_health`]; a timeout of at most 0 seconds selects the agent's default.
pub fn device_health(pool: &str, device: &str, health: HealthStatus, message: &str, seconds: i64) -> DeviceHealth {
    DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: pool.to_owned(), device_name: device.to_owned() }),
        health: health.into(),
        last_updated_time: 0, // the agent uses its receive time
        health_check_timeout_seconds: seconds,
        message: message.to_owned(),
    }
}

/// Allocated `resource.k8s.io/v1` ResourceClaim for the test API server, with one device of the driver per request.
///
/// `pod` is the name and UID of the pod that the claim is reserved for. The devices have the names of
/// [`default_devices`]; the device class has the name of the driver.
pub fn claim_object(
    namespace: &str,
    name: &str,
    uid: &str,
    driver: &str,
    pod: Option<(&str, &str)>,
    requests: &[&str],
) -> Value {
    let exactly = json!({"deviceClassName": driver, "allocationMode": "ExactCount", "count": 1});
    let specs: Vec<Value> = requests.iter().map(|request| json!({"name": request, "exactly": exactly})).collect();
    let claim = Claim { namespace: namespace.to_owned(), uid: uid.to_owned(), name: name.to_owned() };
    let result = |(request, device): (&&str, Device)| {
        let (pool, device) = (device.pool_name, device.device_name);
        json!({"request": request, "driver": driver, "pool": pool, "device": device})
    };
    let results: Vec<Value> = requests.iter().zip(default_devices("", &claim, requests)).map(result).collect();
    let mut object = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": namespace, "name": name, "uid": uid},
        "spec": {"devices": {"requests": specs}},
        "status": {"allocation": {"devices": {"results": results}}},
    });
    if let Some((pod, pod_uid)) = pod {
        object["status"]["reservedFor"] = json!([{"resource": "pods", "name": pod, "uid": pod_uid}]);
    }
    object
}

/// State that the gRPC services and the test share.
struct DriverContext {
    cdi_kind: String,
    script: ServiceScript<DriverMethod, DriverCall, DriverBehavior>,
    /// All health messages; a queue, as a message lists only some of the devices.
    health: watch::Sender<Vec<Vec<DeviceHealth>>>,
}

/// Running DRA driver; drop loses its connections and removes its socket.
pub struct SampleDriver {
    context: Arc<DriverContext>,
    /// Path of the socket of all services.
    pub socket: PathBuf,
    /// Driver name, such as `gpu.example.com`.
    pub name: String,
    /// Names of the services that it registers; of these, it serves [`V1`], [`V1BETA1`], and [`HEALTH`].
    pub services: Vec<String>,
    server: PluginServer,
}

impl SampleDriver {
    /// Starts a driver that serves on `<root>/plugins/<name>/dra.sock`; `root` is the root directory of the agent.
    pub fn start(root: &Path, name: &str, services: &[&str]) -> Self {
        Self::start_at(&root.join("plugins").join(name).join("dra.sock"), name, services)
    }

    /// Starts a driver on another socket, such as the second endpoint of a rolling update.
    ///
    /// # Panics
    /// The socket cannot be created.
    pub fn start_at(socket: &Path, name: &str, services: &[&str]) -> Self {
        fs::create_dir_all(socket.parent().expect("a socket has a directory")).expect("failed to create directory");
        let context = Arc::new(DriverContext {
            cdi_kind: format!("{name}/device"),
            script: ServiceScript::new(DriverBehavior::default()),
            health: watch::Sender::default(),
        });
        let services = services.iter().map(|service| (*service).to_owned()).collect();
        let server = PluginServer::default();
        let mut driver = Self { context, socket: socket.to_owned(), name: name.to_owned(), services, server };
        driver.restart();
        driver
    }

    /// Stops serving if necessary, and serves on a new socket at the same path. Behavior, health, and calls persist.
    ///
    /// # Panics
    /// The socket cannot be created.
    pub fn restart(&mut self) {
        let mut routes = Routes::builder();
        for service in &self.services {
            let context = self.context.clone();
            match service.as_str() {
                V1 => _ = routes.add_service(DraPluginServer::from_arc(context)),
                V1BETA1 => _ = routes.add_service(V1beta1Server::from_arc(context)),
                HEALTH => _ = routes.add_service(DraResourceHealthServer::from_arc(context)),
                _ => {} // it is registered, but not served
            }
        }
        self.server.start(&self.socket, routes.routes());
    }

    /// Removes the socket and loses all connections, as the end of the driver's process does. Idempotent.
    pub fn stop(&mut self) {
        self.server.stop();
    }

    /// Serves a registration socket for the plugin watcher: `<registry_dir>/<driver name>-<socket stem>-reg.sock`.
    ///
    /// The returned plugin records the calls; drop removes that socket. Must be called within a tokio runtime.
    pub fn serve_registration(&self, registry_dir: &Path) -> Plugin {
        let stem = self.socket.file_stem().unwrap_or_default().to_string_lossy();
        let socket = registry_dir.join(format!("{}-{stem}-reg.sock", self.name));
        let endpoint = path::absolute(&self.socket).expect("failed to make the path absolute").display().to_string();
        let services: Vec<&str> = self.services.iter().map(String::as_str).collect();
        Plugin::start(&socket, "DRAPlugin", &self.name, endpoint, &services, RegistrationBehavior::Good)
    }

    /// CDI kind of the prepared devices: `<driver name>/device`.
    pub fn cdi_kind(&self) -> &str {
        &self.context.cdi_kind
    }

    /// Writes a CDI spec file per claim prepared from now on; its devices set `DRA_CLAIM=<claim name>`.
    pub fn set_cdi_directory(&self, directory: &Path) {
        self.change_behavior(|behavior| behavior.cdi_directory = Some(directory.to_owned()));
    }

    /// Prepares the [`default_devices`] of these requests for all later claims.
    pub fn set_requests(&self, requests: &'static [&'static str]) {
        let kind = self.context.cdi_kind.clone();
        let responder = move |claim: &Claim| default_devices(&kind, claim, requests);
        self.change_behavior(|behavior| behavior.devices = Some(Arc::new(responder)));
    }

    /// Sends a health message to all `NodeWatchResources` streams; the newest one is the first of each later stream.
    pub fn set_health(&self, devices: Vec<DeviceHealth>) {
        self.context.health.send_modify(|messages| messages.push(devices));
    }

    /// Ends the open `NodeWatchResources` streams without an error; the driver still serves.
    pub fn end_streams(&self) {
        self.context.script.end_streams();
    }

    /// Changes answers.
    pub fn change_behavior(&self, change: impl FnOnce(&mut DriverBehavior)) {
        self.context.script.change_behavior(change);
    }

    /// Injects a fault into all later calls of a method until [`SampleDriver::heal`].
    pub fn fail(&self, method: DriverMethod, fault: PluginFault) {
        self.context.script.fail(method, fault);
    }

    /// Fails one claim in the results of a method until [`SampleDriver::heal`].
    pub fn fail_claim(&self, method: DriverMethod, claim: &str, error: &str) {
        self.change_behavior(|behavior| _ = behavior.claim_errors.insert((method, claim.to_owned()), error.to_owned()));
    }

    /// Removes all faults, claim errors, skipped claims, and unknown UIDs; hanging calls continue.
    pub fn heal(&self) {
        self.change_behavior(|behavior| {
            let (devices, cdi_directory) = (behavior.devices.take(), behavior.cdi_directory.take());
            *behavior = DriverBehavior { devices, cdi_directory, ..Default::default() };
        });
        // Last: a hanging call continues with the new behavior.
        self.context.script.heal();
    }

    /// All recorded calls, in order of arrival.
    pub fn calls(&self) -> Vec<DriverCall> {
        self.context.script.calls()
    }

    /// Waits until a method has been called at least `count` times since the start; returns its calls.
    ///
    /// # Panics
    /// There are fewer calls after 60 seconds.
    pub async fn wait_for_calls(&self, method: DriverMethod, count: usize) -> Vec<DriverCall> {
        self.context.script.wait_for_calls(method, count).await
    }
}

impl DriverContext {
    /// Carries out a call; results by claim UID.
    async fn answer(
        &self,
        method: DriverMethod,
        service: &'static str,
        claims: impl Iterator<Item = (String, String, String)>,
    ) -> Result<HashMap<String, NodePrepareResourceResponse>, Status> {
        let claims: Vec<Claim> = claims.map(|(namespace, uid, name)| Claim { namespace, uid, name }).collect();
        let behavior = self.script.enter(method, DriverCall { method, service, claims: claims.clone() }).await?;
        let answered = claims.into_iter().take(behavior.answered_claims.unwrap_or(usize::MAX));
        let results = answered.map(|claim| match self.carry_out(&behavior, method, &claim) {
            Ok(devices) => (claim.uid, NodePrepareResourceResponse { devices, error: String::new() }),
            Err(error) => (claim.uid, NodePrepareResourceResponse { devices: Vec::new(), error }),
        });
        let unknown = behavior.unknown_uids.iter().map(|uid| (uid.clone(), Default::default()));
        Ok(results.chain(unknown).collect())
    }

    /// Prepares or unprepares a claim; returns its devices, none at unprepare.
    fn carry_out(&self, behavior: &DriverBehavior, method: DriverMethod, claim: &Claim) -> Result<Vec<Device>, String> {
        if let Some(error) = behavior.claim_errors.get(&(method, claim.name.clone())) {
            return Err(error.clone());
        }
        let devices = match (method, &behavior.devices) {
            (DriverMethod::NodePrepareResources, Some(responder)) => responder(claim),
            (DriverMethod::NodePrepareResources, None) => default_devices(&self.cdi_kind, claim, &[]),
            _ => Vec::new(),
        };
        if let Some(directory) = &behavior.cdi_directory {
            self.update_cdi_spec(directory, claim, &devices).map_err(|error| format!("update CDI spec: {error}"))?;
        }
        Ok(devices)
    }

    /// Writes the CDI spec file of a claim, or removes it if the claim has no CDI devices.
    fn update_cdi_spec(&self, directory: &Path, claim: &Claim, devices: &[Device]) -> io::Result<()> {
        let path = directory.join(format!("{}-{}.json", self.cdi_kind.replace('/', "-"), claim.uid));
        let prefix = format!("{}=", self.cdi_kind);
        let ids = devices.iter().flat_map(|device| &device.cdi_device_ids);
        let names: BTreeSet<&str> = ids.filter_map(|id| id.strip_prefix(prefix.as_str())).collect();
        if names.is_empty() {
            return if path.exists() { fs::remove_file(path) } else { Ok(()) };
        }
        let edits = json!({"env": [format!("DRA_CLAIM={}", claim.name)]});
        let devices: Vec<Value> = names.iter().map(|name| json!({"name": name, "containerEdits": edits})).collect();
        let spec = json!({"cdiVersion": "0.6.0", "kind": self.cdi_kind, "devices": devices});
        fs::create_dir_all(directory)?;
        fs::write(path.with_extension("partial"), spec.to_string())?;
        // Renames, so that a runtime that watches the directory never reads a partial file.
        fs::rename(path.with_extension("partial"), path)
    }
}

/// Implements `DRAPlugin` in one of its versions, whose generated messages are distinct types.
macro_rules! implement_dra_plugin {
    ($api:ident, $service:expr, $device:expr) => {
        #[tonic::async_trait]
        impl $api::dra_plugin_server::DraPlugin for DriverContext {
            async fn node_prepare_resources(
                &self,
                request: Request<$api::NodePrepareResourcesRequest>,
            ) -> Result<Response<$api::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|c| (c.namespace, c.uid, c.name));
                let results = self.answer(DriverMethod::NodePrepareResources, $service, claims).await?;
                let response = |result: NodePrepareResourceResponse| $api::NodePrepareResourceResponse {
                    devices: result.devices.into_iter().map($device).collect(),
                    error: result.error,
                };
                let claims = results.into_iter().map(|(uid, result)| (uid, response(result))).collect();
                Ok(Response::new($api::NodePrepareResourcesResponse { claims }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$api::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$api::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims.into_iter().map(|c| (c.namespace, c.uid, c.name));
                let results = self.answer(DriverMethod::NodeUnprepareResources, $service, claims).await?;
                let response = |error| $api::NodeUnprepareResourceResponse { error };
                let claims = results.into_iter().map(|(uid, result)| (uid, response(result.error))).collect();
                Ok(Response::new($api::NodeUnprepareResourcesResponse { claims }))
            }
        }
    };
}

/// Device without its share ID, which v1beta1 lacks.
fn v1beta1_device(device: Device) -> dra_v1beta1::Device {
    let Device { request_names, pool_name, device_name, cdi_device_ids, .. } = device;
    dra_v1beta1::Device { request_names, pool_name, device_name, cdi_device_ids }
}

implement_dra_plugin!(dra_v1, V1, std::convert::identity);
implement_dra_plugin!(dra_v1beta1, V1BETA1, v1beta1_device);

#[tonic::async_trait]
impl DraResourceHealth for DriverContext {
    type NodeWatchResourcesStream = BoxStream<'static, Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        // Subscribes first: a test that observes the call may end the streams at once.
        let end = self.script.stream_end();
        let method = DriverMethod::NodeWatchResources;
        self.script.enter(method, DriverCall { method, service: HEALTH, claims: Vec::new() }).await?;
        let queue = self.health.subscribe();
        let newest = queue.borrow().len().saturating_sub(1);
        let messages = stream::unfold((queue, newest), |(mut queue, next)| async move {
            let devices = queue.wait_for(|messages| messages.len() > next).await.ok()?.get(next).cloned()?;
            Some((Ok(NodeWatchResourcesResponse { devices }), (queue, next + 1)))
        });
        Ok(Response::new(messages.take_until(end).boxed()))
    }
}
