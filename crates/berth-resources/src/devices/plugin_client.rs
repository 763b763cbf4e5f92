//! gRPC client of a device plugin, with a deadline on every call. Spec 06c §1.1.
//!
//! A client has one connection, which is not renewed: a plugin that restarts registers again. Plugins are not trusted:
//! message sizes, error texts, and NUMA nodes are limited, and paths and environment variables are validated.

use std::{collections::BTreeSet, fmt, path::Path, sync::Arc, time::Duration};

use prost::Message;
use tonic::{Streaming, transport::Channel};
use tracing::warn;

use super::model::{Device, DeviceId, Devices, PluginOptions};
use berth_cri::plugin_socket::{self, MESSAGE, RpcError, TEXT, limited};
use berth_proto::device_plugin::{
    self as proto, AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreferredAllocationRequest, PreferredAllocationResponse, device_plugin_client::DevicePluginClient,
};
use berth_types::{cut_at_char, fieldpath::quoted};

/// Timeout of `GetDevicePluginOptions`.
const OPTIONS: Duration = Duration::from_secs(10);
/// Timeout of `GetPreferredAllocation`.
const PREFERRED_ALLOCATION: Duration = Duration::from_secs(30);
/// Timeout of `Allocate`.
const ALLOCATE: Duration = Duration::from_secs(60);
/// Timeout of `PreStartContainer`.
const PRE_START: Duration = Duration::from_secs(30);
/// Maximum number of NUMA nodes of a device; further ones are ignored.
const NODES: usize = 128;
/// Health text of a healthy device; any other text means unhealthy.
const HEALTHY: &str = "Healthy";

/// Client of a device plugin. Error texts are those of the reference, with gRPC errors as Go prints them.
#[derive(Clone)]
pub struct PluginClient {
    channel: Channel,
    socket: Arc<Path>,
}

impl fmt::Debug for PluginClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PluginClient").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl PluginClient {
    /// Connects to the socket. Retries for 10 s while it is missing or nobody listens.
    ///
    /// # Errors
    /// `failed to dial device plugin: …`: no connection within the timeout, or the path is not a socket.
    pub async fn dial(socket: &Path) -> Result<Self, String> {
        match plugin_socket::dial(socket).await {
            Ok(connection) => Ok(Self { channel: connection.channel, socket: socket.into() }),
            Err(error) => Err(format!("failed to dial device plugin: {error}")),
        }
    }

    /// Calls `GetDevicePluginOptions`; 10 s.
    ///
    /// # Errors
    /// `failed to get device plugin options: …`.
    pub async fn options(&self) -> Result<PluginOptions, String> {
        let mut rpc = self.rpc();
        let answer = limited(OPTIONS, rpc.get_device_plugin_options(Empty {})).await;
        let options = answer.map_err(|error| format!("failed to get device plugin options: {error}"))?;
        Ok(PluginOptions {
            pre_start_required: options.pre_start_required,
            preferred_allocation: options.get_preferred_allocation_available,
        })
    }

    /// Calls `ListAndWatch`. Has no deadline: plugins send the response headers with their first message.
    ///
    /// # Errors
    /// The call fails.
    pub async fn list_and_watch(&self) -> Result<DeviceStream, String> {
        let answer = self.rpc().list_and_watch(Empty {}).await.map_err(RpcError::from)?;
        Ok(DeviceStream { messages: answer.into_inner(), socket: self.socket.clone() })
    }

    /// Calls `GetPreferredAllocation` for one container; 30 s. Returns the IDs that the plugin prefers, unverified.
    ///
    /// # Errors
    /// `device plugin GetPreferredAllocation rpc failed with err: …`.
    pub async fn preferred_allocation(
        &self,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Result<Vec<DeviceId>, String> {
        let request = ContainerPreferredAllocationRequest {
            available_device_i_ds: texts(available),
            must_include_device_i_ds: texts(must_include),
            allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let mut rpc = self.rpc();
        let answer = limited(PREFERRED_ALLOCATION, rpc.get_preferred_allocation(request)).await;
        answer
            .map(preferred_ids)
            .map_err(|error| format!("device plugin GetPreferredAllocation rpc failed with err: {error}"))
    }

    /// Calls `Allocate` for one container; 60 s. Returns the encoded first `ContainerAllocateResponse`.
    ///
    /// # Errors
    /// The call fails, or the response has no container or an invalid field.
    pub async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Vec<u8>, String> {
        let request = ContainerAllocateRequest { devices_ids: texts(ids) };
        let request = AllocateRequest { container_requests: vec![request] };
        let mut rpc = self.rpc();
        first_response(limited(ALLOCATE, rpc.allocate(request)).await?)
    }

    /// Calls `PreStartContainer`; 30 s.
    ///
    /// # Errors
    /// `device plugin PreStartContainer rpc failed with err: …`.
    pub async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String> {
        let request = PreStartContainerRequest { devices_ids: texts(ids) };
        let mut rpc = self.rpc();
        let answer = limited(PRE_START, rpc.pre_start_container(request)).await;
        answer.map(drop).map_err(|error| format!("device plugin PreStartContainer rpc failed with err: {error}"))
    }

    fn rpc(&self) -> DevicePluginClient<Channel> {
        DevicePluginClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE)
    }
}

/// Device lists of a plugin. Dropping the stream cancels the call.
pub struct DeviceStream {
    messages: Streaming<ListAndWatchResponse>,
    socket: Arc<Path>,
}

impl DeviceStream {
    /// Waits for the next list, which replaces the previous one; `None` if the plugin has ended the stream.
    ///
    /// # Errors
    /// The stream broke, or a message exceeds 4 MiB.
    pub async fn next(&mut self) -> Result<Option<Devices>, String> {
        let Some(message) = self.messages.message().await.map_err(RpcError::from)? else { return Ok(None) };
        let (devices, unnamed) = devices(message);
        if unnamed > 0 {
            warn!(socket = %self.socket.display(), count = unnamed, "Ignored devices without ID from device plugin");
        }
        Ok(Some(devices))
    }
}

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceStream").field("socket", &self.socket).finish_non_exhaustive()
    }
}

fn texts(ids: &BTreeSet<DeviceId>) -> Vec<String> {
    ids.iter().map(|id| id.as_str().to_owned()).collect()
}

/// Devices of a message, the last one of each ID; and the number of devices without ID.
pub fn devices(message: ListAndWatchResponse) -> (Devices, usize) {
    let mut unnamed = 0;
    let mut devices = Devices::new();
    for device in message.devices {
        if device.id.is_empty() {
            unnamed += 1;
            continue;
        }
        let nodes = device.topology.into_iter().flat_map(|topology| topology.nodes);
        let nodes = nodes.map(|node| node.id).filter(|node| *node >= 0).take(NODES).collect();
        devices.insert(device.id.into(), Device { is_healthy: device.health == HEALTHY, nodes });
    }
    (devices, unnamed)
}

/// IDs of the first container, or none.
fn preferred_ids(answer: PreferredAllocationResponse) -> Vec<DeviceId> {
    let first = answer.container_responses.into_iter().next();
    first.into_iter().flat_map(|response| response.device_i_ds).map(DeviceId::from).collect()
}

/// Validates and encodes the response for the first container; others are ignored.
///
/// # Errors
/// There is no response, or it has an invalid field.
pub fn first_response(answer: AllocateResponse) -> Result<Vec<u8>, String> {
    // Go prints an empty response as an empty text.
    let missing = || "no containers return in allocation response ".to_owned();
    let response = answer.container_responses.into_iter().next().ok_or_else(missing)?;
    validate_response(&response)?;
    Ok(response.encode_to_vec())
}

/// Checks what would break the container: names of environment variables, and paths.
fn validate_response(response: &ContainerAllocateResponse) -> Result<(), String> {
    for (name, value) in &response.envs {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(invalid("envs", name, "the name of an environment variable without '=' and NUL"));
        }
        if value.contains('\0') {
            return Err(invalid(&format!("envs[{}]", quoted(cut_at_char(name, TEXT))), value, "a text without NUL"));
        }
    }
    for (index, proto::Mount { container_path, host_path, .. }) in response.mounts.iter().enumerate() {
        validate_path(&format!("mounts[{index}].container_path"), container_path)?;
        validate_path(&format!("mounts[{index}].host_path"), host_path)?;
    }
    for (index, proto::DeviceSpec { container_path, host_path, .. }) in response.devices.iter().enumerate() {
        validate_path(&format!("devices[{index}].container_path"), container_path)?;
        validate_path(&format!("devices[{index}].host_path"), host_path)?;
    }
    for (index, device) in response.cdi_devices.iter().enumerate() {
        if device.name.is_empty() || device.name.contains('\0') {
            return Err(invalid(&format!("cdi_devices[{index}].name"), &device.name, "a qualified CDI device name"));
        }
    }
    for (name, value) in &response.annotations {
        if name.is_empty() || name.contains('\0') || value.contains('\0') {
            return Err(invalid("annotations", name, "an annotation without NUL"));
        }
    }
    Ok(())
}

fn validate_path(field: &str, path: &str) -> Result<(), String> {
    if path.starts_with('/') && !path.contains('\0') {
        return Ok(());
    }
    Err(invalid(field, path, "an absolute path without NUL"))
}

fn invalid(field: &str, value: &str, expected: &str) -> String {
    let value = quoted(cut_at_char(value, TEXT));
    format!("invalid {field} {value} in allocation response: expected {expected}")
}

#[cfg(test)]
mod tests {
    use std::os::unix::{fs::symlink, net::UnixListener};

    use super::*;

    fn device(id: &str, health: &str, nodes: Option<&[i64]>) -> proto::Device {
        let topology = nodes
            .map(|nodes| proto::TopologyInfo { nodes: nodes.iter().map(|id| proto::NumaNode { id: *id }).collect() });
        proto::Device { id: id.to_owned(), health: health.to_owned(), topology }
    }

    #[test]
    fn device_lists_are_converted() {
        // AC-06c-3
        let many: Vec<i64> = (-1..1000).collect();
        let message = ListAndWatchResponse {
            devices: vec![
                device("a", "Healthy", None),
                device("b", "Unhealthy", Some(&[1, 0, 1, -1])),
                device("c", "healthy", Some(&[])),
                device("", "Healthy", None),
                device("d", "", Some(&many)),
                device("a", "Unhealthy", Some(&[2])),
                device("e", "Healthy", Some(&[0])),
            ],
        };
        let (devices, unnamed) = devices(message);
        let found: Vec<(&str, bool, Vec<i64>)> = (devices.iter())
            .map(|(id, device)| (id.as_str(), device.is_healthy, device.nodes.iter().copied().collect()))
            .collect();
        let expected: [(&str, bool, Vec<i64>); 5] = [
            ("a", false, vec![2]),
            ("b", false, vec![0, 1]),
            ("c", false, vec![]),
            ("d", false, (0..128).collect()),
            ("e", true, vec![0]),
        ];
        assert_eq!((found, unnamed), (expected.to_vec(), 1));
    }

    #[test]
    fn preferred_devices_are_those_of_the_first_container() {
        let container = |ids: &[&str]| proto::ContainerPreferredAllocationResponse {
            device_i_ds: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        for (containers, expected) in
            [(vec![], vec![]), (vec![container(&["d3", "d1"]), container(&["d2"])], vec!["d3", "d1"])]
        {
            let found = preferred_ids(PreferredAllocationResponse { container_responses: containers });
            assert_eq!(found.iter().map(DeviceId::as_str).collect::<Vec<_>>(), expected);
        }
    }

    #[test]
    fn an_allocation_is_the_response_for_the_first_container() {
        let annotated = |value: &str| ContainerAllocateResponse {
            annotations: [("a".to_owned(), value.to_owned())].into(),
            ..Default::default()
        };
        let answer = |containers| AllocateResponse { container_responses: containers };
        let encoded = first_response(answer(vec![annotated("x"), annotated("y")])).expect("valid");
        assert_eq!(ContainerAllocateResponse::decode(encoded.as_slice()).expect("decodable"), annotated("x"));
        assert_eq!(first_response(answer(vec![])), Err("no containers return in allocation response ".to_owned()));
    }

    #[test]
    fn invalid_allocations_name_their_field() {
        let env = |name: &str, value: &str| ContainerAllocateResponse {
            envs: [(name.to_owned(), value.to_owned())].into(),
            ..Default::default()
        };
        let mount = |container: &str, host: &str| ContainerAllocateResponse {
            mounts: vec![proto::Mount {
                container_path: container.to_owned(),
                host_path: host.to_owned(),
                read_only: false,
            }],
            ..Default::default()
        };
        let device = |container: &str, host: &str| ContainerAllocateResponse {
            devices: vec![proto::DeviceSpec {
                container_path: container.to_owned(),
                host_path: host.to_owned(),
                permissions: "rw".to_owned(),
            }],
            ..Default::default()
        };
        for (response, expected) in [
            (env("A", "x=y"), None),
            (env("", "x"), Some("invalid envs \"\" ")),
            (env("A=B", "x"), Some("invalid envs \"A=B\" ")),
            (env("A\0", "x"), Some("invalid envs \"A\\x00\" ")),
            (env("A", "\0"), Some("invalid envs[\"A\"] \"\\x00\" ")),
            (mount("/a", "/b"), None),
            (mount("a", "/b"), Some("invalid mounts[0].container_path \"a\" ")),
            (mount("/a", ""), Some("invalid mounts[0].host_path \"\" ")),
            (mount("/a", "/\0"), Some("invalid mounts[0].host_path \"/\\x00\" ")),
            (device("/dev/a", "/dev/b"), None),
            (device("./a", "/dev/b"), Some("invalid devices[0].container_path \"./a\" ")),
            (device("/dev/a", "../b"), Some("invalid devices[0].host_path \"../b\" ")),
        ] {
            let error = validate_response(&response).err();
            match (&error, expected) {
                (None, None) => {}
                (Some(error), Some(expected)) => assert!(error.starts_with(expected), "{error}"),
                _ => panic!("{response:?}: {error:?}"),
            }
        }
    }

    #[tokio::test]
    async fn only_sockets_are_connected_to() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        let _listener = UnixListener::bind(at("plugin.sock")).expect("bound");
        symlink("plugin.sock", at("link.sock")).expect("linked");
        std::fs::write(at("file.sock"), "").expect("written");
        PluginClient::dial(&at("plugin.sock")).await.expect("connected");
        for name in ["link.sock", "file.sock", "."] {
            let error = PluginClient::dial(&at(name)).await.expect_err("no socket");
            let path = at(name);
            assert_eq!(error, format!("failed to dial device plugin: dial unix {}: not a socket", path.display()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_socket_is_retried_until_the_timeout() {
        let directory = tempfile::tempdir().expect("a directory");
        let begun = tokio::time::Instant::now();
        let error = PluginClient::dial(&directory.path().join("plugin.sock")).await.expect_err("no socket");
        let timeout = Duration::from_secs(10);
        assert!((timeout..timeout + Duration::from_secs(1)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        assert!(error.starts_with("failed to dial device plugin: context deadline exceeded: dial unix /"), "{error}");
    }
}
