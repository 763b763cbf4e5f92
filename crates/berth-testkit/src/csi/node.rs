//! Identity and Node services of the fake CSI driver.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};
use tonic::{Request, Response, Status};

use berth_proto::csi::{
    self, NodeServiceCapability, VolumeCapability, VolumeUsage, node_service_capability, volume_capability,
    volume_usage,
};

use super::{Call, DriverContext, lock, mounts_below};

fn failed(what: &str) -> impl Fn(io::Error) -> Status {
    let what = what.to_owned();
    move |error| Status::internal(format!("{what}: {error}"))
}

fn bind(source: &Path, target: &Path, read_only: bool) -> Result<(), Status> {
    let none: Option<&str> = None;
    let io = |error: nix::Error| Status::internal(format!("bind {}: {error}", target.display()));
    mount(Some(source), target, none, MsFlags::MS_BIND, none).map_err(io)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, target, none, flags, none).map_err(io)?;
    }
    Ok(())
}

fn is_mounted(path: &Path) -> bool {
    mounts_below(path).iter().any(|place| place == path)
}

fn unbind(path: &Path) -> Result<(), Status> {
    while is_mounted(path) {
        umount2(path, MntFlags::UMOUNT_NOFOLLOW)
            .map_err(|error| Status::internal(format!("unmount {}: {error}", path.display())))?;
    }
    Ok(())
}

fn capability(of: Option<&VolumeCapability>) -> Value {
    let Some(of) = of else { return Value::Null };
    let mode = of.access_mode.as_ref().map(|mode| mode.mode().as_str_name());
    match &of.access_type {
        Some(volume_capability::AccessType::Mount(mount)) => json!({"mode": mode, "fsType": mount.fs_type,
            "flags": mount.mount_flags, "group": mount.volume_mount_group}),
        Some(volume_capability::AccessType::Block(_)) => json!({"mode": mode, "block": true}),
        None => Value::Null,
    }
}

fn is_block(of: Option<&VolumeCapability>) -> bool {
    matches!(of.and_then(|of| of.access_type.as_ref()), Some(volume_capability::AccessType::Block(_)))
}

fn call(method: &'static str, volume: &str, path: &str, rest: Value) -> Call {
    Call { method, volume: volume.to_owned(), path: PathBuf::from(path), rest, ok: None }
}

#[tonic::async_trait]
impl csi::identity_server::Identity for DriverContext {
    async fn get_plugin_info(
        &self,
        _: Request<csi::GetPluginInfoRequest>,
    ) -> Result<Response<csi::GetPluginInfoResponse>, Status> {
        let name = lock(&self.nature).name.clone();
        Ok(Response::new(csi::GetPluginInfoResponse { name, ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<csi::GetPluginCapabilitiesResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn probe(&self, _: Request<csi::ProbeRequest>) -> Result<Response<csi::ProbeResponse>, Status> {
        Ok(Response::new(csi::ProbeResponse { ready: Some(true) }))
    }
}

#[tonic::async_trait]
impl csi::node_server::Node for DriverContext {
    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        self.act(call("NodeGetInfo", "", "", Value::Null), || {
            let nature = lock(&self.nature).clone();
            Ok(csi::NodeGetInfoResponse {
                node_id: nature.node_id,
                max_volumes_per_node: nature.max_volumes,
                accessible_topology: Some(csi::Topology { segments: nature.topology.into_iter().collect() }),
            })
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        self.act(call("NodeGetCapabilities", "", "", Value::Null), || {
            let one = |kind: &node_service_capability::rpc::Type| NodeServiceCapability {
                r#type: Some(node_service_capability::Type::Rpc(node_service_capability::Rpc {
                    r#type: (*kind).into(),
                })),
            };
            let capabilities = lock(&self.nature).capabilities.iter().map(one).collect();
            Ok(csi::NodeGetCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        let asked = request.into_inner();
        let rest = json!({"capability": capability(asked.volume_capability.as_ref()), "secrets": asked.secrets,
            "publishContext": asked.publish_context, "volumeContext": asked.volume_context});
        let (id, staging) = (asked.volume_id, PathBuf::from(&asked.staging_target_path));
        self.act(call("NodeStageVolume", &id, &asked.staging_target_path, rest), || {
            let is_block = is_block(asked.volume_capability.as_ref());
            if !is_block && !is_mounted(&staging) {
                bind(&self.volume(&id), &staging, false)?;
            }
            Ok(csi::NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        let asked = request.into_inner();
        let staging = PathBuf::from(&asked.staging_target_path);
        self.act(call("NodeUnstageVolume", &asked.volume_id, &asked.staging_target_path, Value::Null), || {
            unbind(&staging)?;
            Ok(csi::NodeUnstageVolumeResponse {})
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        let rest = json!({"capability": capability(asked.volume_capability.as_ref()), "secrets": asked.secrets,
            "publishContext": asked.publish_context, "volumeContext": asked.volume_context,
            "readonly": asked.readonly, "staging": asked.staging_target_path});
        let (id, target) = (asked.volume_id, PathBuf::from(&asked.target_path));
        self.act(call("NodePublishVolume", &id, &asked.target_path, rest), || {
            if is_mounted(&target) {
                return Ok(csi::NodePublishVolumeResponse {});
            }
            if is_block(asked.volume_capability.as_ref()) {
                let device = fs::read_to_string(self.volume(&id).join("device")).map_err(failed("device"))?;
                fs::File::create(&target).map_err(failed("target"))?;
                return bind(Path::new(device.trim()), &target, false).map(|()| csi::NodePublishVolumeResponse {});
            }
            fs::create_dir_all(&target).map_err(failed("target"))?;
            let staging = Path::new(&asked.staging_target_path);
            let is_staged = !asked.staging_target_path.is_empty();
            if is_staged && !is_mounted(staging) {
                return Err(Status::failed_precondition("volume is not staged"));
            }
            let volume = self.volume(&id);
            bind(if is_staged { staging } else { &volume }, &target, asked.readonly)?;
            Ok(csi::NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        let asked = request.into_inner();
        let target = PathBuf::from(&asked.target_path);
        self.act(call("NodeUnpublishVolume", &asked.volume_id, &asked.target_path, Value::Null), || {
            unbind(&target)?;
            match fs::symlink_metadata(&target) {
                Ok(meta) if meta.is_dir() => fs::remove_dir(&target).map_err(failed("target"))?,
                Ok(_) => fs::remove_file(&target).map_err(failed("target"))?,
                Err(_) => {}
            }
            Ok(csi::NodeUnpublishVolumeResponse {})
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        let asked = request.into_inner();
        self.act(call("NodeGetVolumeStats", &asked.volume_id, &asked.volume_path, Value::Null), || {
            let usage = |unit: volume_usage::Unit, total| VolumeUsage {
                available: total - 10,
                total,
                used: 10,
                unit: unit.into(),
            };
            let usage = vec![usage(volume_usage::Unit::Bytes, 1000), usage(volume_usage::Unit::Inodes, 100)];
            let condition = lock(&self.nature).condition.clone();
            let volume_condition = condition.map(|(abnormal, message)| csi::VolumeCondition { abnormal, message });
            Ok(csi::NodeGetVolumeStatsResponse { usage, volume_condition })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        let asked = request.into_inner();
        let bytes = asked.capacity_range.map_or(0, |range| range.required_bytes);
        let rest = json!({"bytes": bytes, "staging": asked.staging_target_path, "secrets": asked.secrets});
        let id = asked.volume_id;
        self.act(call("NodeExpandVolume", &id, &asked.volume_path, rest), || {
            lock(&self.state).sizes.insert(id.clone(), bytes);
            Ok(csi::NodeExpandVolumeResponse { capacity_bytes: bytes })
        })
        .await
    }
}
