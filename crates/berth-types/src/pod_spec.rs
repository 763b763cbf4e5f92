//! Pod spec in memory: the members of the API object, with volumes in compact form. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Serialize, Serializer, ser::SerializeStruct};

use super::{api, volume::Volume};

/// A member of the API object, serialized like the API object: omitted if unset.
trait Member {
    fn is_set(&self) -> bool;
    fn write<S: SerializeStruct>(&self, name: &'static str, to: &mut S) -> Result<(), S::Error>;
}

impl<T: Serialize> Member for Option<T> {
    fn is_set(&self) -> bool {
        self.is_some()
    }

    fn write<S: SerializeStruct>(&self, name: &'static str, to: &mut S) -> Result<(), S::Error> {
        self.as_ref().map_or(Ok(()), |value| to.serialize_field(name, value))
    }
}

/// A mandatory member is always written.
impl<T: Serialize> Member for Vec<T> {
    fn is_set(&self) -> bool {
        true
    }

    fn write<S: SerializeStruct>(&self, name: &'static str, to: &mut S) -> Result<(), S::Error> {
        to.serialize_field(name, self)
    }
}

/// Conversion of a member to and from its stored form.
trait StoredMember<T> {
    fn keep(whole: T) -> Self;
    fn whole(&self) -> T;
}

impl<T: Clone> StoredMember<T> for T {
    fn keep(whole: T) -> Self {
        whole
    }

    fn whole(&self) -> T {
        self.clone()
    }
}

/// Boxed, because the member is large and few pods set it.
impl<T: Clone> StoredMember<Option<T>> for Option<Box<T>> {
    fn keep(whole: Option<T>) -> Self {
        whole.map(Box::new)
    }

    fn whole(&self) -> Option<T> {
        self.as_deref().cloned()
    }
}

macro_rules! members {
    ($($member:ident: $type:ty = $name:literal,)*) => {
        /// A pod spec. All members but the volumes have the types of the API object.
        #[derive(Clone, PartialEq, Debug)]
        pub struct PodSpec {
            $(
                #[doc = concat!("`", $name, "`.")]
                pub $member: $type,
            )*
            volumes: Option<Box<[Volume]>>,
        }

        impl From<api::PodSpec> for PodSpec {
            fn from(spec: api::PodSpec) -> Self {
                let volumes = spec.volumes.map(|all| all.into_iter().map(Volume::from).collect());
                Self { $($member: StoredMember::keep(spec.$member),)* volumes }
            }
        }

        impl PodSpec {
            /// Returns the API object (a deep copy).
            pub fn to_object(&self) -> api::PodSpec {
                let volumes = self.volumes.as_ref().map(|all| all.iter().map(Volume::to_object).collect());
                api::PodSpec { $($member: StoredMember::whole(&self.$member),)* volumes }
            }
        }

        /// Serializes byte for byte like the API object.
        impl Serialize for PodSpec {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let members = [$(self.$member.is_set(),)* self.volumes.is_set()];
                let count = members.into_iter().filter(|is_set| *is_set).count();
                let mut to = serializer.serialize_struct("PodSpec", count)?;
                $(self.$member.write($name, &mut to)?;)*
                self.volumes.write("volumes", &mut to)?;
                to.end()
            }
        }
    };
}

members! {
    active_deadline_seconds: Option<i64> = "activeDeadlineSeconds",
    affinity: Option<Box<api::Affinity>> = "affinity",
    automount_service_account_token: Option<bool> = "automountServiceAccountToken",
    containers: Vec<api::Container> = "containers",
    dns_config: Option<Box<api::PodDNSConfig>> = "dnsConfig",
    dns_policy: Option<String> = "dnsPolicy",
    enable_service_links: Option<bool> = "enableServiceLinks",
    ephemeral_containers: Option<Vec<api::EphemeralContainer>> = "ephemeralContainers",
    host_aliases: Option<Vec<api::HostAlias>> = "hostAliases",
    host_ipc: Option<bool> = "hostIPC",
    host_network: Option<bool> = "hostNetwork",
    host_pid: Option<bool> = "hostPID",
    host_users: Option<bool> = "hostUsers",
    hostname: Option<String> = "hostname",
    hostname_override: Option<String> = "hostnameOverride",
    image_pull_secrets: Option<Vec<api::LocalObjectReference>> = "imagePullSecrets",
    init_containers: Option<Vec<api::Container>> = "initContainers",
    node_name: Option<String> = "nodeName",
    node_selector: Option<BTreeMap<String, String>> = "nodeSelector",
    os: Option<api::PodOS> = "os",
    overhead: Option<BTreeMap<String, Quantity>> = "overhead",
    preemption_policy: Option<String> = "preemptionPolicy",
    priority: Option<i32> = "priority",
    priority_class_name: Option<String> = "priorityClassName",
    readiness_gates: Option<Vec<api::PodReadinessGate>> = "readinessGates",
    resource_claims: Option<Vec<api::PodResourceClaim>> = "resourceClaims",
    resources: Option<api::ResourceRequirements> = "resources",
    restart_policy: Option<String> = "restartPolicy",
    runtime_class_name: Option<String> = "runtimeClassName",
    scheduler_name: Option<String> = "schedulerName",
    scheduling_gates: Option<Vec<api::PodSchedulingGate>> = "schedulingGates",
    scheduling_group: Option<api::PodSchedulingGroup> = "schedulingGroup",
    security_context: Option<Box<api::PodSecurityContext>> = "securityContext",
    service_account: Option<String> = "serviceAccount",
    service_account_name: Option<String> = "serviceAccountName",
    set_hostname_as_fqdn: Option<bool> = "setHostnameAsFQDN",
    share_process_namespace: Option<bool> = "shareProcessNamespace",
    subdomain: Option<String> = "subdomain",
    termination_grace_period_seconds: Option<i64> = "terminationGracePeriodSeconds",
    tolerations: Option<Vec<api::Toleration>> = "tolerations",
    topology_spread_constraints: Option<Vec<api::TopologySpreadConstraint>> = "topologySpreadConstraints",
}

impl PodSpec {
    /// Returns the volumes in their order, each as an API object.
    pub fn volumes(&self) -> impl Iterator<Item = api::Volume> {
        self.volumes.iter().flatten().map(Volume::to_object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// One value for each member, in the API's JSON.
    fn members() -> Vec<(&'static str, Value)> {
        vec![
            ("activeDeadlineSeconds", json!(5)),
            (
                "affinity",
                json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}),
            ),
            ("automountServiceAccountToken", json!(false)),
            ("dnsConfig", json!({"nameservers": ["10.0.0.1"]})),
            ("dnsPolicy", json!("None")),
            ("enableServiceLinks", json!(true)),
            ("ephemeralContainers", json!([{"name": "e", "targetContainerName": "c"}])),
            ("hostAliases", json!([{"ip": "10.0.0.2", "hostnames": ["h"]}])),
            ("hostIPC", json!(true)),
            ("hostNetwork", json!(true)),
            ("hostPID", json!(true)),
            ("hostUsers", json!(false)),
            ("hostname", json!("h")),
            ("hostnameOverride", json!("o")),
            ("imagePullSecrets", json!([{"name": "s"}])),
            ("initContainers", json!([{"name": "i", "restartPolicy": "Always"}])),
            ("nodeName", json!("n")),
            ("nodeSelector", json!({"a": "b"})),
            ("os", json!({"name": "linux"})),
            ("overhead", json!({"cpu": "1"})),
            ("preemptionPolicy", json!("Never")),
            ("priority", json!(7)),
            ("priorityClassName", json!("p")),
            ("readinessGates", json!([{"conditionType": "g"}])),
            ("resourceClaims", json!([{"name": "r", "resourceClaimName": "q"}])),
            ("resources", json!({"requests": {"cpu": "1"}})),
            ("restartPolicy", json!("Never")),
            ("runtimeClassName", json!("r")),
            ("schedulerName", json!("d")),
            ("schedulingGates", json!([{"name": "g"}])),
            ("schedulingGroup", json!({"podGroupName": "g"})),
            ("securityContext", json!({"runAsUser": 5})),
            ("serviceAccount", json!("a")),
            ("serviceAccountName", json!("a")),
            ("setHostnameAsFQDN", json!(true)),
            ("shareProcessNamespace", json!(true)),
            ("subdomain", json!("s")),
            ("terminationGracePeriodSeconds", json!(30)),
            ("tolerations", json!([{"key": "k", "operator": "Exists"}])),
            (
                "topologySpreadConstraints",
                json!([{"maxSkew": 1, "topologyKey": "k", "whenUnsatisfiable": "DoNotSchedule"}]),
            ),
            ("volumes", json!([{"name": "v", "configMap": {"name": "m"}}, {"name": "w", "emptyDir": {}}])),
        ]
    }

    /// Checks that a spec is converted, converted back, and serialized like the API type.
    fn survives(chosen: &[bool]) -> api::PodSpec {
        let mut spec = json!({"containers": [{"name": "c", "image": "i"}]});
        for ((name, value), _) in members().into_iter().zip(chosen).filter(|(_, is_chosen)| **is_chosen) {
            spec[name] = value;
        }
        let object: api::PodSpec = serde_json::from_value(spec).expect("a spec");
        let kept = PodSpec::from(object.clone());
        assert_eq!(kept.to_object(), object);
        assert_eq!(serde_json::to_string(&kept).expect("JSON"), serde_json::to_string(&object).expect("JSON"));
        object
    }

    #[test]
    fn every_member_survives() {
        let whole = serde_json::to_value(survives(&vec![true; members().len()])).expect("JSON");
        for (name, _) in members() {
            assert!(whole.get(name).is_some(), "{name} is no member");
        }
        assert_eq!(whole.as_object().map(serde_json::Map::len), Some(members().len() + 1), "with the containers");
        for only in 0..members().len() {
            survives(&(0..members().len()).map(|at| at == only).collect::<Vec<_>>());
        }
    }

    #[test]
    fn there_is_no_room_for_what_few_pods_have() {
        assert!(size_of::<PodSpec>() <= 816, "{}", size_of::<PodSpec>());
    }

    #[test]
    fn no_volumes_are_not_an_empty_list() {
        for text in [r#"{"containers":[]}"#, r#"{"containers":[],"volumes":[]}"#] {
            let object: api::PodSpec = serde_json::from_str(text).expect("a spec");
            assert_eq!(serde_json::to_string(&PodSpec::from(object)).expect("JSON"), text);
        }
    }

    proptest! {
        #[test]
        fn any_choice_of_members_survives(chosen in proptest::collection::vec(any::<bool>(), members().len())) {
            survives(&chosen);
        }
    }
}
