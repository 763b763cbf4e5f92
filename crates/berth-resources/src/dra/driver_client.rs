//! gRPC client of one endpoint of a DRA driver, with a deadline on every call. Spec 06c §3.1, §3.6, §3.8.
//!
//! A client has one connection, which is not renewed: the task of the endpoint replaces the client. Drivers are not
//! trusted: message sizes, numbers of devices, and the lengths of texts are limited.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming, transport::Channel};
use tracing::warn;

use super::{
    claim_error::{ClaimError, DriverMethod},
    claim_plan::{PreparedResults, UnpreparedResults},
    health::{DeviceHealth, DeviceReport},
    model::{ClaimKey, PreparedDevice},
};
use berth_cri::{
    code_name,
    plugin_socket::{self, MESSAGE, PluginConnection, RpcError, TEXT, limited},
};
use berth_metrics::DraMetrics;
use berth_proto::{
    dra_v1::{self, dra_plugin_client::DraPluginClient},
    dra_v1beta1::{self, dra_plugin_client::DraPluginClient as V1Beta1Client},
    v1alpha1::{self, dra_resource_health_client::DraResourceHealthClient},
};
use berth_types::{cut_at_char, fieldpath::quoted};

/// Timeout of `NodePrepareResources` and `NodeUnprepareResources`.
const CALL: Duration = Duration::from_secs(45);
/// Maximum number of devices that a driver prepares for a claim.
const DEVICES: usize = 1_000;

/// Version of the driver's service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DriverService {
    /// `v1.DRAPlugin`
    V1,
    /// `v1beta1.DRAPlugin`
    V1Beta1,
}

impl DriverService {
    const ALL: [Self; 2] = [Self::V1, Self::V1Beta1];

    /// Name in the registration of a driver.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1Beta1 => "v1beta1.DRAPlugin",
        }
    }

    /// Full path of a method.
    fn path(self, method: DriverMethod) -> &'static str {
        match (self, method) {
            (Self::V1, DriverMethod::Prepare) => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            (Self::V1, DriverMethod::Unprepare) => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            (Self::V1Beta1, DriverMethod::Prepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources"
            }
            (Self::V1Beta1, DriverMethod::Unprepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources"
            }
        }
    }
}

/// Chooses the service of a driver: the first of its list that is supported.
///
/// # Errors
/// `invalid supported gRPC versions of DRA driver plugin …`: the list is empty or contains no supported service.
pub fn choose_service(driver: &str, endpoint: &Path, versions: &[String]) -> Result<DriverService, String> {
    let invalid = |cause: &str| {
        let endpoint = endpoint.display();
        format!("invalid supported gRPC versions of DRA driver plugin {driver} at endpoint {endpoint}: {cause}")
    };
    if versions.is_empty() {
        return Err(invalid("empty list of supported gRPC services (aka supported versions)"));
    }
    let service = |version: &String| DriverService::ALL.into_iter().find(|service| version == service.name());
    versions.iter().find_map(service).ok_or_else(|| {
        let listed = quoted_list(versions.iter().map(String::as_str));
        let supported = quoted_list(DriverService::ALL.into_iter().map(DriverService::name));
        invalid(&format!(
            "none of services supported by the plugin ({}) are supported by the kubelet ({supported})",
            cut_at_char(&listed, TEXT)
        ))
    })
}

/// List of texts as Go's `%q` prints it.
fn quoted_list<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    format!("[{}]", texts.map(quoted).collect::<Vec<_>>().join(" "))
}

/// Socket of a driver and the service that it has there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct DriverEndpoint {
    /// Name of the driver.
    pub driver: String,
    /// Absolute path of the socket.
    pub socket: PathBuf,
    /// Service to call.
    pub service: DriverService,
}

/// Client of a DRA driver. Error texts are those of the reference, with gRPC errors as Go prints them.
#[derive(Clone)]
pub struct DriverClient {
    endpoint: Arc<DriverEndpoint>,
    metrics: DraMetrics,
    /// The error of the connection attempt if it failed.
    connection: Result<PluginConnection, Arc<str>>,
}

impl fmt::Debug for DriverClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverClient").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl DriverClient {
    /// Connects to the endpoint with a single attempt. If it fails, all calls fail with its error, as in gRPC's Go
    /// library.
    pub(super) async fn dial(endpoint: Arc<DriverEndpoint>, metrics: DraMetrics) -> Self {
        let connection = plugin_socket::connect(&endpoint.socket).await;
        let connection = connection.map_err(|error| Arc::from(error.to_string()));
        Self { endpoint, metrics, connection }
    }

    /// Token that is cancelled when the connection has ended.
    ///
    /// # Errors
    /// The connection attempt failed.
    pub(super) fn ended(&self) -> Result<&CancellationToken, &str> {
        self.connection.as_ref().map(|connection| &connection.ended).map_err(|error| &**error)
    }

    /// Calls `NodePrepareResources` for claims with their UIDs; 45 s.
    ///
    /// # Errors
    /// `ClaimError::Rpc`. Errors of single claims are in the results.
    pub async fn prepare(&self, claims: &[(ClaimKey, String)]) -> Result<PreparedResults, ClaimError> {
        self.measured(DriverMethod::Prepare, self.call_prepare(claims)).await
    }

    /// Calls `NodeUnprepareResources` for claims with their UIDs; 45 s.
    ///
    /// # Errors
    /// `ClaimError::Rpc`. Errors of single claims are in the results.
    pub async fn unprepare(&self, claims: &[(ClaimKey, String)]) -> Result<UnpreparedResults, ClaimError> {
        self.measured(DriverMethod::Unprepare, self.call_unprepare(claims)).await
    }

    /// Opens the stream of health reports. Has no deadline: drivers send the response headers with their first message.
    ///
    /// # Errors
    /// The call fails; `Unimplemented` if the driver reports no health.
    pub(super) async fn watch_health(&self) -> Result<HealthStream, RpcError> {
        let mut rpc = DraResourceHealthClient::new(self.channel()?).max_decoding_message_size(MESSAGE);
        let answer = rpc.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await?;
        Ok(HealthStream { messages: answer.into_inner(), endpoint: self.endpoint.clone() })
    }

    /// Records the duration and status code of a call.
    async fn measured<T>(
        &self,
        method: DriverMethod,
        call: impl Future<Output = Result<T, RpcError>>,
    ) -> Result<T, ClaimError> {
        let began = Instant::now();
        let answer = call.await;
        let code = answer.as_ref().err().map_or(Code::Ok, |error| error.code);
        let path = self.endpoint.service.path(method);
        self.metrics.call(&self.endpoint.driver, path, code_name(code), began.elapsed());
        answer.map_err(|error| ClaimError::Rpc { method, text: error.text })
    }

    async fn call_prepare(&self, claims: &[(ClaimKey, String)]) -> Result<PreparedResults, RpcError> {
        let channel = self.channel()?;
        let results = match self.endpoint.service {
            DriverService::V1 => {
                let mut rpc = DraPluginClient::new(channel).max_decoding_message_size(MESSAGE);
                let request = dra_v1::NodePrepareResourcesRequest { claims: v1_claims(claims) };
                let answer = limited(CALL, rpc.node_prepare_resources(request)).await?;
                answer.claims.into_iter().map(|(uid, claim)| prepared(&uid, claim.devices, &claim.error)).collect()
            }
            DriverService::V1Beta1 => {
                let mut rpc = V1Beta1Client::new(channel).max_decoding_message_size(MESSAGE);
                let request = dra_v1beta1::NodePrepareResourcesRequest { claims: v1beta1_claims(claims) };
                let answer = limited(CALL, rpc.node_prepare_resources(request)).await?;
                let result = |(uid, claim): (String, dra_v1beta1::NodePrepareResourceResponse)| {
                    prepared(&uid, claim.devices.into_iter().map(as_v1).collect(), &claim.error)
                };
                answer.claims.into_iter().map(result).collect()
            }
        };
        Ok(results)
    }

    async fn call_unprepare(&self, claims: &[(ClaimKey, String)]) -> Result<UnpreparedResults, RpcError> {
        let channel = self.channel()?;
        let results = match self.endpoint.service {
            DriverService::V1 => {
                let mut rpc = DraPluginClient::new(channel).max_decoding_message_size(MESSAGE);
                let request = dra_v1::NodeUnprepareResourcesRequest { claims: v1_claims(claims) };
                let answer = limited(CALL, rpc.node_unprepare_resources(request)).await?;
                answer.claims.into_iter().map(|(uid, claim)| unprepared(&uid, &claim.error)).collect()
            }
            DriverService::V1Beta1 => {
                let mut rpc = V1Beta1Client::new(channel).max_decoding_message_size(MESSAGE);
                let request = dra_v1beta1::NodeUnprepareResourcesRequest { claims: v1beta1_claims(claims) };
                let answer = limited(CALL, rpc.node_unprepare_resources(request)).await?;
                answer.claims.into_iter().map(|(uid, claim)| unprepared(&uid, &claim.error)).collect()
            }
        };
        Ok(results)
    }

    fn channel(&self) -> Result<Channel, RpcError> {
        match &self.connection {
            Ok(connection) => Ok(connection.channel.clone()),
            Err(error) => Err(unavailable(error)),
        }
    }
}

/// Error of gRPC's Go library for a call without a connection.
fn unavailable(error: &str) -> RpcError {
    let cause = quoted(&format!("transport: Error while dialing: {}", cut_at_char(error, TEXT)));
    let text = format!("rpc error: code = Unavailable desc = connection error: desc = {cause}");
    RpcError { code: Code::Unavailable, text }
}

/// Health reports of a driver. Dropping the stream cancels the call.
pub(super) struct HealthStream {
    messages: Streaming<v1alpha1::NodeWatchResourcesResponse>,
    endpoint: Arc<DriverEndpoint>,
}

impl HealthStream {
    /// Waits for the next message; `None` if the driver has ended the stream.
    ///
    /// # Errors
    /// The stream broke, or a message exceeds 4 MiB.
    pub async fn next(&mut self) -> Result<Option<Vec<DeviceReport>>, RpcError> {
        let Some(message) = self.messages.message().await? else { return Ok(None) };
        let (reports, ignored) = device_reports(message);
        if ignored > 0 {
            let DriverEndpoint { driver, socket, .. } = &*self.endpoint;
            warn!(driverName = driver, endpoint = %socket.display(), count = ignored, "Ignored invalid devices in health message of DRA driver");
        }
        Ok(Some(reports))
    }
}

/// Reports of a message; and the number of devices without identifier or with a name above the limit.
fn device_reports(message: v1alpha1::NodeWatchResourcesResponse) -> (Vec<DeviceReport>, usize) {
    let count = message.devices.len();
    let reports: Vec<DeviceReport> = message.devices.into_iter().filter_map(device_report).collect();
    let ignored = count - reports.len();
    (reports, ignored)
}

fn device_report(device: v1alpha1::DeviceHealth) -> Option<DeviceReport> {
    let health = match device.health() {
        v1alpha1::HealthStatus::Unknown => DeviceHealth::Unknown,
        v1alpha1::HealthStatus::Healthy => DeviceHealth::Healthy,
        v1alpha1::HealthStatus::Unhealthy => DeviceHealth::Unhealthy,
    };
    let timeout = u64::try_from(device.health_check_timeout_seconds).map(Duration::from_secs).unwrap_or_default();
    let id = device.device.filter(|id| id.pool_name.len() <= TEXT && id.device_name.len() <= TEXT)?;
    Some(DeviceReport { pool: id.pool_name, device: id.device_name, health, timeout, message: device.message })
}

fn v1_claims(claims: &[(ClaimKey, String)]) -> Vec<dra_v1::Claim> {
    let claim = |(key, uid): &(ClaimKey, String)| dra_v1::Claim {
        namespace: key.namespace.clone(),
        uid: uid.clone(),
        name: key.name.clone(),
    };
    claims.iter().map(claim).collect()
}

fn v1beta1_claims(claims: &[(ClaimKey, String)]) -> Vec<dra_v1beta1::Claim> {
    let claim = |(key, uid): &(ClaimKey, String)| dra_v1beta1::Claim {
        namespace: key.namespace.clone(),
        uid: uid.clone(),
        name: key.name.clone(),
    };
    claims.iter().map(claim).collect()
}

/// Device of version v1beta1, which has no shares.
fn as_v1(device: dra_v1beta1::Device) -> dra_v1::Device {
    dra_v1::Device {
        request_names: device.request_names,
        pool_name: device.pool_name,
        device_name: device.device_name,
        cdi_device_ids: device.cdi_device_ids,
        share_id: None,
    }
}

/// Result of one claim, by its UID.
fn prepared(uid: &str, devices: Vec<dra_v1::Device>, error: &str) -> (String, Result<Vec<PreparedDevice>, String>) {
    let (uid, outcome) = unprepared(uid, error);
    (uid, outcome.and_then(|()| prepared_devices(devices)))
}

/// Result of one claim, by its UID. An empty error text means success.
fn unprepared(uid: &str, error: &str) -> (String, Result<(), String>) {
    let outcome = if error.is_empty() { Ok(()) } else { Err(cut_at_char(error, TEXT).to_owned()) };
    (cut_at_char(uid, TEXT).to_owned(), outcome)
}

/// Converts devices. Too many devices or too long names are errors: a container without some of its devices, or with a
/// truncated CDI device name, would fail later.
fn prepared_devices(devices: Vec<dra_v1::Device>) -> Result<Vec<PreparedDevice>, String> {
    if devices.len() > DEVICES {
        return Err(format!("driver returned {} devices, expected at most {DEVICES}", devices.len()));
    }
    devices.into_iter().map(prepared_device).collect()
}

fn prepared_device(device: dra_v1::Device) -> Result<PreparedDevice, String> {
    if let Some(length) = overlong_name(&device) {
        let device = quoted(cut_at_char(&device.device_name, TEXT));
        return Err(format!("driver returned device {device} with a name of {length} bytes, expected at most {TEXT}"));
    }
    Ok(PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share_id: device.share_id,
        requests: device.request_names,
        cdi_ids: device.cdi_device_ids,
    })
}

/// Length of the first name in a device that is above the limit.
fn overlong_name(device: &dra_v1::Device) -> Option<usize> {
    let names = [&device.pool_name, &device.device_name].into_iter().chain(&device.share_id);
    let names = names.chain(&device.request_names).chain(&device.cdi_device_ids);
    names.map(String::len).find(|length| *length > TEXT)
}

#[cfg(test)]
mod tests {
    use v1alpha1::{DeviceIdentifier, HealthStatus, NodeWatchResourcesResponse};

    use super::*;

    #[test]
    fn the_first_supported_service_of_the_driver_is_chosen() {
        let prefix = "invalid supported gRPC versions of DRA driver plugin gpu at endpoint /p/dra.sock: ";
        let empty = "empty list of supported gRPC services (aka supported versions)";
        // AC-06c-18
        let other = "none of services supported by the plugin ([\"v3.X\"]) are supported by the kubelet \
                     ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])";
        let others = "none of services supported by the plugin ([\"v1\" \"v1alpha1.DRAResourceHealth\"]) are \
                      supported by the kubelet ([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])";
        let cases: [(&[&str], Result<DriverService, &str>); 7] = [
            (&["v1.DRAPlugin"], Ok(DriverService::V1)),
            (&["v1.DRAPlugin", "v1beta1.DRAPlugin"], Ok(DriverService::V1)),
            // AC-06c-17
            (&["v1beta1.DRAPlugin", "v1.DRAPlugin"], Ok(DriverService::V1Beta1)),
            (&["v3.X", "v1alpha1.DRAResourceHealth", "v1.DRAPlugin"], Ok(DriverService::V1)),
            (&[], Err(empty)),
            (&["v3.X"], Err(other)),
            (&["v1", "v1alpha1.DRAResourceHealth"], Err(others)),
        ];
        for (versions, expected) in cases {
            let versions: Vec<String> = versions.iter().map(|version| (*version).to_owned()).collect();
            let found = choose_service("gpu", Path::new("/p/dra.sock"), &versions);
            assert_eq!(found, expected.map_err(|cause| format!("{prefix}{cause}")), "{versions:?}");
        }
        let long = ["x".repeat(1 << 20)];
        let error = choose_service("gpu", Path::new("/p/dra.sock"), &long).expect_err("not supported");
        assert!(error.len() < 2 * TEXT && error.ends_with("\"v1beta1.DRAPlugin\"])"), "{error}");
    }

    #[test]
    fn results_of_claims_are_converted() {
        let device = |name: &str| dra_v1::Device {
            request_names: vec!["r".to_owned()],
            pool_name: "pool".to_owned(),
            device_name: name.to_owned(),
            cdi_device_ids: vec!["v/gpu=0".to_owned()],
            share_id: Some("s".to_owned()),
        };
        let converted = PreparedDevice {
            pool: "pool".to_owned(),
            device: "d".to_owned(),
            share_id: Some("s".to_owned()),
            requests: vec!["r".to_owned()],
            cdi_ids: vec!["v/gpu=0".to_owned()],
        };
        let long_name = "x".repeat(TEXT + 1);
        let too_long = format!(
            "driver returned device \"{}\" with a name of 1025 bytes, expected at most 1024",
            cut_at_char(&long_name, TEXT)
        );
        for (devices, error, expected) in [
            (vec![device("d")], "", Ok(vec![converted])),
            (vec![], "", Ok(vec![])),
            (vec![device("d")], "no memory", Err("no memory".to_owned())),
            (vec![], &*long_name, Err("x".repeat(TEXT))),
            (vec![device(&long_name)], "", Err(too_long)),
            (vec![device("d"); 1001], "", Err("driver returned 1001 devices, expected at most 1000".to_owned())),
        ] {
            assert_eq!(prepared("u", devices, error), ("u".to_owned(), expected));
        }
        assert_eq!(prepared("u", vec![device("d"); 1000], "").1.map(|devices| devices.len()), Ok(1000));
        assert_eq!(unprepared("u", ""), ("u".to_owned(), Ok(())));
        assert_eq!(unprepared(&long_name, "busy"), ("x".repeat(TEXT), Err("busy".to_owned())));
    }

    #[test]
    fn health_messages_are_converted() {
        let device = |name: Option<&str>, health: i32, timeout: i64| v1alpha1::DeviceHealth {
            device: name.map(|name| DeviceIdentifier { pool_name: "p".to_owned(), device_name: name.to_owned() }),
            health,
            last_updated_time: 7,
            health_check_timeout_seconds: timeout,
            message: "m".to_owned(),
        };
        let message = NodeWatchResourcesResponse {
            devices: vec![
                device(Some("a"), HealthStatus::Healthy.into(), 60),
                device(None, HealthStatus::Healthy.into(), 60),
                device(Some("b"), HealthStatus::Unhealthy.into(), -1),
                device(Some(&"x".repeat(TEXT + 1)), HealthStatus::Healthy.into(), 60),
                device(Some("c"), HealthStatus::Unknown.into(), 0),
                device(Some("d"), 9, 0),
            ],
        };
        let (reports, ignored) = device_reports(message);
        let found: Vec<(&str, &str, DeviceHealth, u64, &str)> = (reports.iter())
            .map(|report| (&*report.pool, &*report.device, report.health, report.timeout.as_secs(), &*report.message))
            .collect();
        let expected = [
            ("p", "a", DeviceHealth::Healthy, 60, "m"),
            ("p", "b", DeviceHealth::Unhealthy, 0, "m"),
            ("p", "c", DeviceHealth::Unknown, 0, "m"),
            ("p", "d", DeviceHealth::Unknown, 0, "m"),
        ];
        assert_eq!((found, ignored), (expected.to_vec(), 2));
    }

    #[test]
    fn calls_without_a_connection_have_the_error_of_go() {
        let error = unavailable("dial unix /p/dra.sock: not a socket");
        let text = "rpc error: code = Unavailable desc = connection error: desc = \"transport: Error while dialing: \
                    dial unix /p/dra.sock: not a socket\"";
        assert_eq!((error.code, &*error.text), (Code::Unavailable, text));
    }
}
