//! API keys, and what separates those who use them.

use crate::error::{ApiError, Result};
use axum::http::{HeaderMap, header};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};
use warpsmith_engine::Salt;

/// Who sends a request: the number of the key, if keys are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant(Option<u32>);

/// Whose prefixes and requests somebody may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope(Option<[u8; 16]>);

impl Scope {
    /// Whether what has this salt belongs to it.
    pub fn has(&self, salt: Option<&Salt>) -> bool {
        self.0.is_none_or(|owner| salt.is_some_and(|salt| salt[..16] == owner))
    }
}

/// The keys that are accepted. Only their digests are kept.
pub struct Keys {
    /// Made for this process: neither digests nor salts can be computed elsewhere.
    secret: [u8; 32],
    digests: Vec<[u8; 32]>,
}

impl Keys {
    /// Without keys everybody is served.
    pub fn new(keys: &[String]) -> Keys {
        let secret = secret();
        // Headers lose the space around a key, and files that keys are read from often end with a line break.
        let digest = |key: &String| *blake3::keyed_hash(&secret, key.trim().as_bytes()).as_bytes();
        Keys { secret, digests: keys.iter().map(digest).collect() }
    }

    /// Who sends a request with these headers.
    ///
    /// The key is compared by its digest, with all keys, in constant time: the time tells nothing about any of them.
    ///
    /// # Errors
    /// If a key is needed and none of the accepted ones is given.
    pub fn tenant(&self, headers: &HeaderMap) -> Result<Tenant> {
        if self.digests.is_empty() {
            return Ok(Tenant(None));
        }
        let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()).unwrap_or_default();
        let scheme = given.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "));
        let key = if scheme { given[7..].trim_ascii() } else { &[] };
        let digest = *blake3::keyed_hash(&self.secret, key).as_bytes();
        let (mut found, mut number) = (Choice::from(0), 0u32);
        for (i, known) in self.digests.iter().enumerate() {
            let same = known.ct_eq(&digest);
            number.conditional_assign(&(i as u32), same);
            found |= same;
        }
        match bool::from(found) && scheme {
            true => Ok(Tenant(Some(number))),
            false => Err(ApiError::unauthorized()),
        }
    }

    /// What separates cached prefixes: by key, and by the salt that a request brings.
    pub fn salt(&self, tenant: Tenant, own: Option<&str>) -> Option<Salt> {
        if tenant.0.is_none() && own.is_none() {
            return None;
        }
        let owner = self.owner(tenant);
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(&owner).update(&[u8::from(own.is_some())]).update(own.unwrap_or_default().as_bytes());
        // The first half tells whose it is, the second half which of theirs.
        let mut salt = *hasher.finalize().as_bytes();
        salt[..16].copy_from_slice(&owner);
        Some(salt)
    }

    /// What somebody may see: with keys, what was asked with the same key.
    pub fn scope(&self, tenant: Tenant) -> Scope {
        Scope(tenant.0.is_some().then(|| self.owner(tenant)))
    }

    /// The first half of all salts of a tenant.
    fn owner(&self, tenant: Tenant) -> [u8; 16] {
        let digest = tenant.0.map_or(&[][..], |number| &self.digests[number as usize]);
        let hash = *blake3::keyed_hash(&self.secret, digest).as_bytes();
        std::array::from_fn(|i| hash[i])
    }
}

/// Bytes that nobody can guess.
fn secret() -> [u8; 32] {
    use std::io::Read;
    let mut bytes = [0; 32];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.expect("the system has random numbers");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_a_tenant_with_salts_of_its_own() {
        let keys = Keys::new(&["alpha".into(), " beta\n".into()]);
        let tenant = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            keys.tenant(&headers)
        };
        let (alpha, beta) = (tenant("Bearer alpha").unwrap(), tenant("bearer  beta ").unwrap());
        assert_ne!(alpha, beta);
        for wrong in
            ["Bearer gamma", "alpha", "Bearer", "Bearer ", "Basic alpha", "Bearer alphaa", "Bearer alph"]
        {
            assert_eq!(tenant(wrong).unwrap_err(), ApiError::unauthorized(), "{wrong}");
        }
        assert!(keys.tenant(&HeaderMap::new()).is_err());
        let salts = [
            keys.salt(alpha, None),
            keys.salt(beta, None),
            keys.salt(alpha, Some("")),
            keys.salt(alpha, Some("x")),
            keys.salt(beta, Some("x")),
        ];
        let different: std::collections::BTreeSet<_> = salts.iter().collect();
        assert!(different.len() == 5 && salts.iter().all(Option::is_some));
        let (alphas, betas) = (keys.scope(alpha), keys.scope(beta));
        assert_eq!(salts.map(|salt| alphas.has(salt.as_ref())), [true, false, true, true, false]);
        assert_eq!(salts.map(|salt| betas.has(salt.as_ref())), [false, true, false, false, true]);
        assert!(!alphas.has(None));
        let open = Keys::new(&[]);
        let everybody = open.tenant(&HeaderMap::new()).unwrap();
        assert_eq!(open.salt(everybody, None), None);
        assert_ne!(open.salt(everybody, Some("a")), open.salt(everybody, Some("b")));
        let all = open.scope(everybody);
        assert!(all.has(None) && all.has(open.salt(everybody, Some("a")).as_ref()));
    }
}
